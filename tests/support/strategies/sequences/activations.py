"""How a random graph quantizes and dequantizes activations: ops of PT2E and torchao, and plain ones."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from tests.support.strategies.grower import Value
from tests.support.strategies.sequences.grower import SequenceGrower
from torch.fx import Node
from torch.fx.node import Argument

from qfuse.ir.ops.views import shape_of

# The ops of PT2E and torchao exist once these are imported.
importlib.import_module("torch.ao.quantization.fx._decomposed")
importlib.import_module("torchao.quantization.quant_primitives")
aten = torch.ops.aten
pt2e = torch.ops.quantized_decomposed
torchao = torch.ops.torchao

Bounds = tuple[torch.dtype, int, int]
BOUNDS: list[Bounds] = [
    (torch.int8, -128, 127),
    (torch.uint8, 0, 255),
    (torch.int8, -127, 127),
    (torch.uint8, 0, 127),
    (torch.int8, -8, 7),
]
Quantizer = Callable[[SequenceGrower, Value], Value]


def quantized(g: SequenceGrower, x: Value) -> Value:
    """Quantize and dequantize a sequence in one of the spellings."""
    return g.pick(QUANTIZERS)(g, x)


def _number(g: SequenceGrower, bounds: Bounds) -> tuple[float, int]:
    """A scale and a zero point within the range."""
    _, low, high = bounds
    zero = int(torch.randint(low, high + 1, (), generator=g.random))
    return float(g.scales([1])), 0 if low <= 0 <= high and g.chance(2) else zero


def _out(g: SequenceGrower, x: Value) -> dict[str, Argument]:
    real = g.real(x)
    return {} if real is torch.float32 else {"out_dtype": real}


def _finish(g: SequenceGrower, x: Value, node: Node) -> Value:
    """The dequantized value in the type of the source, most of the time."""
    real = g.real(x)
    if node.meta["val"].dtype != real and not g.chance(4):
        node = g.call(aten._to_copy.default, node, dtype=real)
    return g.add(node)


def static_numbers(g: SequenceGrower, x: Value) -> Value:
    """PT2E with a scale and a zero point as numbers."""
    bounds = g.pick(BOUNDS)
    dtype, low, high = bounds
    args = (*_number(g, bounds), low, high, dtype)
    q = g.call(pt2e.quantize_per_tensor.default, x.node, *args)
    _keep(g, q)
    made = g.add(g.call(pt2e.dequantize_per_tensor.default, q, *args, **_out(g, x)))
    if g.chance(5):
        # One dequantize for each user, as exports have it.
        g.add(g.call(pt2e.dequantize_per_tensor.default, q, *args, **_out(g, x)))
    return made


def static_tensors(g: SequenceGrower, x: Value) -> Value:
    """PT2E with a scale and a zero point as constant tensors of one element."""
    bounds = g.pick(BOUNDS)
    dtype, low, high = bounds
    number, offset = _number(g, bounds)
    shape = g.pick([(), (1,)])
    scale = g.b.const(g.name("scale"), torch.full(shape, number))
    zero_dtype = g.pick([torch.int64, torch.int32])
    zero = g.b.const(g.name("zero"), torch.full(shape, offset, dtype=zero_dtype))
    args = (scale, zero, low, high, dtype)
    q = g.call(pt2e.quantize_per_tensor.tensor, x.node, *args)
    _keep(g, q)
    return g.add(g.call(pt2e.dequantize_per_tensor.tensor, q, *args, **_out(g, x)))


def static_channels(g: SequenceGrower, x: Value) -> Value:
    """PT2E with a scale for each feature, or along another axis."""
    dtype, low, high = bounds = g.pick(BOUNDS)
    known = [a for a, size in enumerate(shape_of(x.node)) if isinstance(size, int)]
    if not known:
        return static_numbers(g, x)
    axis = g.pick([known[-1], *known])
    count = int(shape_of(x.node)[axis])
    zeros = torch.tensor([_number(g, bounds)[1] for _ in range(count)])
    args = (g.scale([count]), g.b.const(g.name("zero"), zeros), axis, low, high, dtype)
    q = g.call(pt2e.quantize_per_channel.default, x.node, *args)
    return g.add(g.call(pt2e.dequantize_per_channel.default, q, *args, **_out(g, x)))


def chosen_per_tensor(g: SequenceGrower, x: Value) -> Value:
    """PT2E with a scale of the whole tensor, chosen at run time."""
    dtype, low, high = g.pick(BOUNDS[:3])
    eps = torch.finfo(torch.float32).eps
    symmetric = dtype is torch.int8 and g.chance(3)
    choose = pt2e.choose_qparams_symmetric.tensor if symmetric else pt2e.choose_qparams.tensor
    both = g.call(choose, x.node, low, high, eps, dtype)
    args = (g.b.item(both, 0), g.b.item(both, 1), low, high, dtype)
    q = g.call(pt2e.quantize_per_tensor.tensor, x.node, *args)
    return g.add(g.call(pt2e.dequantize_per_tensor.tensor, q, *args, **_out(g, x)))


def chosen_per_token(g: SequenceGrower, x: Value) -> Value:
    """PT2E with scales per row, chosen at run time."""
    choose = g.pick([pt2e.choose_qparams_per_token_asymmetric, pt2e.choose_qparams_per_token])
    both = g.call(choose.default, x.node, torch.int8)
    args = (g.b.item(both, 0), g.b.item(both, 1), -128, 127, torch.int8)
    q = g.call(pt2e.quantize_per_token.default, x.node, *args)
    return _finish(g, x, g.call(pt2e.dequantize_per_token.default, q, *args, torch.float32))


def affine(g: SequenceGrower, x: Value) -> Value:
    """Torchao with scales per row, or of the whole tensor, chosen at run time."""
    sizes = list(shape_of(x.node))
    if not isinstance(sizes[-1], int) or sizes[-1] == 1:
        # A block is made of numbers. Torchao reduces every axis of a block of ones.
        return static_numbers(g, x)
    whole = g.chance(3) and all(isinstance(size, int) for size in sizes)
    block: list[Argument] = [*sizes] if whole else [*[1] * (len(sizes) - 1), sizes[-1]]
    kind = g.pick(["SYMMETRIC", "ASYMMETRIC"])
    eps = torch.finfo(torch.float32).eps
    choice = (kind, block, torch.int8, -128, 127, eps, torch.float32, torch.int8)
    both = g.call(torchao.choose_qparams_affine.default, x.node, *choice, keepdim=True)
    scale, zero = g.b.item(both, 0), g.b.item(both, 1)
    rest = (block, scale, zero, torch.int8)
    q = g.call(torchao.quantize_affine.default, x.node, *rest, -128, 127)
    _keep(g, q)
    end = (-128, 127, g.real(x))
    return g.add(g.call(torchao.dequantize_affine.default, q, *rest, *end))


def by_hand(g: SequenceGrower, x: Value) -> Value:
    """Static, in plain ops: divide or multiply, round, add the zero point, clamp, cast."""
    bounds = g.pick(BOUNDS)
    dtype, low, high = bounds
    number, offset = _number(g, bounds)
    scaled = (
        g.call(aten.div.Tensor, x.node, number)
        if g.chance(2)
        else g.call(aten.mul.Tensor, x.node, 1 / number)
    )
    early = bool(offset) and g.draw_bool()
    if early:
        scaled = g.call(aten.add.Tensor, scaled, offset)
    scaled = g.call(aten.round.default, scaled)
    if offset and not early:
        scaled = g.call(aten.add.Tensor, scaled, offset)
    q = g.call(aten._to_copy.default, g.call(aten.clamp.default, scaled, low, high), dtype=dtype)
    _keep(g, q)
    real = g.call(aten._to_copy.default, q, dtype=g.real(x))
    if offset:
        real = g.call(aten.sub.Tensor, real, offset)
    return g.made(aten.mul.Tensor, real, number)


def rows_by_hand(g: SequenceGrower, x: Value) -> Value:
    """Symmetric per row, in plain ops."""
    scale = row_scale(g, x)
    return g.made(aten.mul.Tensor, _cast(g, _rounded(g, x.node, scale), g.real(x)), scale)


def row_scale(g: SequenceGrower, x: Value) -> Node:
    """The largest magnitude of each row over 127."""
    largest = g.call(aten.amax.default, g.call(aten.abs.default, x.node), [-1], True)
    if not g.chance(3):
        largest = g.call(aten.clamp_min.default, largest, 1e-5)
        return g.call(aten.div.Tensor, largest, 127)
    scale = g.call(aten.div.Tensor, largest, 127.0)
    return g.call(aten.clamp.default, scale, 1e-8)


def _rounded(g: SequenceGrower, x: Node, scale: Node) -> Node:
    q = g.call(aten.round.default, g.call(aten.div.Tensor, x, scale))
    return _cast(g, g.call(aten.clamp.default, q, -128, 127), torch.int8)


def _cast(g: SequenceGrower, x: Node, dtype: torch.dtype) -> Node:
    return g.call(aten._to_copy.default, x, dtype=dtype)


def asymmetric_by_hand(g: SequenceGrower, x: Value) -> Value:
    """Asymmetric per row, in plain ops."""
    least = g.call(aten.amin.default, x.node, [-1], True)
    most = g.call(aten.amax.default, x.node, [-1], True)
    if g.draw_bool():
        least, most = (
            g.call(aten.clamp_max.default, least, 0),
            g.call(aten.clamp_min.default, most, 0),
        )
    span = g.call(aten.sub.Tensor, most, least)
    scale = g.call(aten.clamp_min.default, g.call(aten.div.Tensor, span, 255), 1e-6)
    ratio = g.call(aten.round.default, g.call(aten.div.Tensor, least, scale))
    zero = g.call(aten.clamp.default, g.call(aten.neg.default, ratio), 0, 255)
    q = g.call(
        aten.add.Tensor, g.call(aten.round.default, g.call(aten.div.Tensor, x.node, scale)), zero
    )
    q = _cast(g, g.call(aten.clamp.default, q, 0, 255), torch.uint8)
    return g.made(aten.mul.Tensor, g.call(aten.sub.Tensor, _cast(g, q, g.real(x)), zero), scale)


def fake_quantized(g: SequenceGrower, x: Value) -> Value:
    """A fake quantize."""
    bounds = g.pick(BOUNDS)
    _, low, high = bounds
    op = aten.fake_quantize_per_tensor_affine.default
    if g.real(x) is not torch.float32:
        return static_numbers(g, x)
    return g.add(g.call_like(x.node, op, x.node, *_number(g, bounds), low, high))


def float8(g: SequenceGrower, x: Value) -> Value:
    """Float8 with one scale."""
    if any(g.real(value) is not torch.float32 for value in g.values):
        # A sum that is rounded to 16 bits another way moves to the next float8 now and then, a step
        # that the noise of the source does not show.
        return static_numbers(g, x)
    number = float(g.scales([1]))
    scaled = g.call(aten.mul.Tensor, x.node, 1 / number)
    stored = _cast(g, g.call(aten.clamp.default, scaled, -448, 448), torch.float8_e4m3fn)
    return g.made(aten.mul.Tensor, _cast(g, stored, g.real(x)), number)


def _keep(g: SequenceGrower, q: Node) -> None:
    if g.chance(10):
        g.results.append(q)


QUANTIZERS: list[Quantizer] = [
    static_numbers,
    chosen_per_token,
    affine,
    static_numbers,
    rows_by_hand,
    static_tensors,
    by_hand,
    chosen_per_tensor,
    static_channels,
    asymmetric_by_hand,
    fake_quantized,
    float8,
]
