"""The weights of random products: quantized constants in the spellings of PT2E, torchao and plain ops."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.support.strategies.sequences.activations import pt2e, torchao
from tests.support.strategies.sequences.grower import SequenceGrower
from torch.fx import Node

aten = torch.ops.aten

Weight = Callable[[SequenceGrower, int, int, torch.dtype], Node]


def weight(g: SequenceGrower, n: int, k: int, real: torch.dtype) -> Node:
    """Add a weight [n, k] as a float tensor."""
    # A call that draws again has weights of other sizes.
    made = g.pick(MOVED) if g.chance(6) else g.pick(WEIGHTS)
    return made(g, n, k, real)


def values(g: SequenceGrower, *shape: int, low: int = -127, high: int = 127) -> Node:
    """Add constant quantized values as int8, or uint8 above 127."""
    dtype = torch.int8 if high <= 127 else torch.uint8
    made = torch.randint(low, high + 1, shape, generator=g.random).to(dtype)
    return g.b.const(g.name("w"), made)


def _per_channel(g: SequenceGrower, n: int, k: int, real: torch.dtype) -> Node:
    low = g.pick([-127, -128])
    axis = g.pick([0, 0, 0, 1]) if g.usual() else 1
    count = (n, k)[axis]
    zeros = torch.zeros(count, dtype=torch.int64)
    if g.chance(4):
        zeros = torch.randint(-5, 6, (count,), generator=g.random)
    zero = g.b.const(g.name("zero"), zeros)
    args = (values(g, n, k), g.scale([count]), zero, axis, low, 127, torch.int8)
    out = {} if real is torch.float32 else {"out_dtype": real}
    return g.call(pt2e.dequantize_per_channel.default, *args, **out)


def _per_tensor(g: SequenceGrower, n: int, k: int, real: torch.dtype) -> Node:
    out = {} if real is torch.float32 else {"out_dtype": real}
    args = (float(g.scales([1])), g.pick([0, 0, 3]), -128, 127, torch.int8)
    return g.call(pt2e.dequantize_per_tensor.default, values(g, n, k), *args, **out)


def _group_of(g: SequenceGrower, k: int) -> int:
    return g.pick([size for size in (4, 8, 2, 16, k) if k % size == 0])


def _pt2e_groups(g: SequenceGrower, n: int, k: int, real: torch.dtype) -> Node:
    group = _group_of(g, k)
    if group == 1:
        # The op refuses groups of one.
        return _cast_scale(g, n, k, real)
    zeros = torch.zeros((n, k // group), dtype=torch.int32)
    zero = g.b.const(g.name("zero"), zeros)
    args = (g.scale([n, k // group]), zero, -8, 7, torch.int8, group, real)
    q = values(g, n, k, low=-8, high=7)
    return g.call(pt2e.dequantize_per_channel_group.default, q, *args)


def _affine_groups(g: SequenceGrower, n: int, k: int, real: torch.dtype) -> Node:
    group = _group_of(g, k)
    low, high = g.pick([(-8, 7), (-128, 127)])
    zeros = torch.zeros((n, k // group), dtype=torch.int8)
    if g.chance(3):
        zeros = torch.randint(-3, 4, zeros.shape, generator=g.random).to(torch.int8)
    zero = g.b.const(g.name("zero"), zeros)
    args = ([1, group], g.scale([n, k // group]), zero, torch.int8, low, high, real)
    q = values(g, n, k, low=low, high=high)
    return g.call(torchao.dequantize_affine.default, q, *args)


def _cast_scale(g: SequenceGrower, n: int, k: int, real: torch.dtype) -> Node:
    """Cast, perhaps minus a zero point, times or over a scale."""
    w = g.call(aten._to_copy.default, values(g, n, k), dtype=real)
    if g.chance(3):
        zero = torch.randint(-5, 6, (n, 1), generator=g.random).to(real)
        w = g.call(aten.sub.Tensor, w, g.b.const(g.name("zero"), zero))
    shape = g.pick([(n, 1), (n, 1), (1, 1)])
    if g.chance(5):
        inverse = g.b.const(g.name("inverse"), (1 / g.scales(shape)).to(real))
        return g.call(aten.div.Tensor, w, inverse)
    return g.call(aten.mul.Tensor, w, g.scale(shape, real))


def _grouped_by_hand(g: SequenceGrower, n: int, k: int, real: torch.dtype) -> Node:
    group = _group_of(g, k)
    w = g.call(aten._to_copy.default, values(g, n, k, low=-8, high=7), dtype=real)
    w = g.call(aten.view.default, w, [n, k // group, group])
    w = g.call(aten.mul.Tensor, w, g.scale((n, k // group, 1), real))
    return g.call(aten.view.default, w, [n, k])


def _repeated_groups(g: SequenceGrower, n: int, k: int, real: torch.dtype) -> Node:
    """Scales per group that are repeated per element, with every kind of zero point."""
    group = _group_of(g, k)
    grid = (n, k // group)
    by_expand = g.draw_bool()

    def spread(param: Node) -> Node:
        if not by_expand:
            return g.call(aten.repeat_interleave.self_int, param, group, 1)
        split = g.call(aten.unsqueeze.default, param, -1)
        split = g.call(aten.expand.default, split, [n, k // group, group])
        return g.call(aten.reshape.default, split, [n, k])

    w = g.call(aten._to_copy.default, values(g, n, k, low=0, high=15), dtype=real)
    kind = g.pick(["none", "number", "whole", "fractions"])
    if kind == "number":
        w = g.call(aten.sub.Tensor, w, g.pick([8, 7.0]))
    elif kind != "none":
        zeros = torch.randint(3, 12, grid, generator=g.random).to(real)
        zeros = zeros + 0.25 if kind == "fractions" else zeros
        w = g.call(aten.sub.Tensor, w, spread(g.b.const(g.name("zero"), zeros)))
    return g.call(aten.mul.Tensor, w, spread(g.scale(grid, real)))


def _ternary(g: SequenceGrower, n: int, k: int, real: torch.dtype) -> Node:
    """Four values of -1, 0 and 1 per byte, over a scale."""
    if n % 4:
        return _cast_scale(g, n, k, real)
    parts = torch.randint(0, 3, (4, n // 4, k), generator=g.random)
    packed = (parts << torch.tensor([0, 2, 4, 6])[:, None, None]).sum(0).to(torch.uint8)
    held = g.b.const(g.name("w"), packed)
    shifted = [g.call(aten.__rshift__.Scalar, held, 2 * place) for place in range(4)]
    two = [g.call(aten.bitwise_and.Scalar, part, 3) for part in shifted]
    w = g.call(aten._to_copy.default, g.call(aten.cat.default, two), dtype=real)
    w = g.call(aten.sub.Tensor, w, 1)
    return g.call(aten.div.Tensor, w, g.scale((n, 1), real)) if g.draw_bool() else w


def _nibbles(g: SequenceGrower, n: int, k: int, real: torch.dtype) -> Node:
    """Two 4-bit values per byte."""
    if k % 2:
        return _cast_scale(g, n, k, real)
    packed = values(g, n, k // 2, low=0, high=255)
    halves = [
        g.call(aten.bitwise_and.Scalar, packed, 15),
        g.call(aten.__rshift__.Scalar, packed, 4),
    ]
    both = g.call(aten.stack.default, halves if g.draw_bool() else halves[::-1], -1)
    flat = g.call(aten.reshape.default, both, [n, k])
    w = g.call(aten.sub.Tensor, g.call(aten._to_copy.default, flat, dtype=real), 8)
    return g.call(aten.mul.Tensor, w, g.scale((n, 1), real))


def _float8(g: SequenceGrower, n: int, k: int, real: torch.dtype) -> Node:
    stored = torch.randn((n, k), generator=g.random).to(torch.float8_e4m3fn)
    w = g.call(aten._to_copy.default, g.b.const(g.name("w"), stored), dtype=real)
    return g.call(aten.mul.Tensor, w, g.scale(g.pick([(n, 1), (1, 1)]), real))


def _float16(g: SequenceGrower, n: int, k: int, real: torch.dtype) -> Node:
    stored = (torch.randn((n, k), generator=g.random) * 0.1).to(torch.float16)
    return g.call(aten._to_copy.default, g.b.const(g.name("w"), stored), dtype=real)


def _plain(g: SequenceGrower, n: int, k: int, real: torch.dtype) -> Node:
    return g.b.const(g.name("w"), (torch.randn((n, k), generator=g.random) * 0.1).to(real))


def _quantized_here(g: SequenceGrower, n: int, k: int, real: torch.dtype) -> Node:
    """A float constant that the graph quantizes."""
    plain = g.b.const(g.name("w"), torch.randn((n, k), generator=g.random) * 0.1)
    zero = g.b.const(g.name("zero"), torch.zeros(n, dtype=torch.int32))
    args = (g.b.const(g.name("scale"), g.scales([n]) * 0.1 + 1e-3), zero, 0, -127, 127)
    if real is torch.float32 and g.draw_bool():
        return g.call_like(plain, aten.fake_quantize_per_channel_affine.default, plain, *args)
    q = g.call(pt2e.quantize_per_channel.default, plain, *args, torch.int8)
    out = {} if real is torch.float32 else {"out_dtype": real}
    return g.call(pt2e.dequantize_per_channel.default, q, *args, torch.int8, **out)


def _input(g: SequenceGrower, n: int, k: int, real: torch.dtype) -> Node:
    """A weight that is given at run time."""
    q = g.arg("w", torch.int8, [n, k])
    w = g.call(aten._to_copy.default, q, dtype=real)
    return g.call(aten.mul.Tensor, w, g.scale((n, 1), real))


WEIGHTS: list[Weight] = [
    _repeated_groups,
    _ternary,
    _per_channel,
    _affine_groups,
    _cast_scale,
    _per_channel,
    _per_tensor,
    _pt2e_groups,
    _grouped_by_hand,
    _nibbles,
    _float8,
    _float16,
    _quantized_here,
    _plain,
    _input,
]


def _rows_of_a_split(g: SequenceGrower, n: int, k: int, real: torch.dtype) -> Node:
    parts = g.call(aten.split.Tensor, g.pick(WEIGHTS)(g, 2 * n, k, real), n)
    return g.b.item(parts, g.pick([0, 1]))


def _columns_of_a_split(g: SequenceGrower, n: int, k: int, real: torch.dtype) -> Node:
    whole = g.pick(WEIGHTS)(g, n, 2 * k, real)
    parts = g.call(aten.split_with_sizes.default, whole, [k, k], -1)
    return g.b.item(parts, g.pick([0, 1]))


def _reordered(g: SequenceGrower, n: int, k: int, real: torch.dtype) -> Node:
    """Rows or columns in another order."""
    w, axis = g.pick(WEIGHTS)(g, n, k, real), g.pick([0, 1])
    if g.draw_bool():
        return g.call(aten.flip.default, w, [axis])
    order = torch.randperm((n, k)[axis], generator=g.random)
    index = g.b.const(g.name("order"), order)
    if g.draw_bool():
        return g.call(aten.index.Tensor, w, [*[None] * axis, index])
    return g.call(aten.index_select.default, w, axis, index)


def _of_a_stack(g: SequenceGrower, n: int, k: int, real: torch.dtype) -> Node:
    both = [g.pick(WEIGHTS)(g, n, k, real) for _ in range(2)]
    axis = g.pick([0, 1, 2])
    stack = g.call(aten.stack.default, both, axis)
    if g.draw_bool():
        return g.call(aten.select.int, stack, axis, g.pick([0, 1, -1]))
    return g.b.item(g.call(aten.unbind.int, stack, axis), g.pick([0, 1]))


def _turned_before_its_scale(g: SequenceGrower, n: int, k: int, real: torch.dtype) -> Node:
    """A transpose or a slice between the cast and a scale, some of which is negative."""
    turned = g.draw_bool()
    w = g.call(aten._to_copy.default, values(g, *((k, n) if turned else (n + 3, k))), dtype=real)
    if g.draw_bool():
        w = g.call(aten.sub.Tensor, w, g.pick([3, -2.0]))
    if turned:
        w = g.call(aten.permute.default, w, [1, 0])
    else:
        first = g.pick([0, 2])
        w = g.call(aten.slice.Tensor, w, 0, first, first + n)
    signs = torch.randint(0, 2, (n, 1), generator=g.random).to(real) * 2 - 1
    scale = g.b.const(g.name("scale"), g.scales((n, 1)).to(real) * signs)
    return g.call(g.pick([aten.mul.Tensor, aten.multiply.Tensor]), w, scale)


def _negated(g: SequenceGrower, n: int, k: int, real: torch.dtype) -> Node:
    w = g.pick(WEIGHTS)(g, n, k, real)
    return g.call(aten.neg.default, w) if g.draw_bool() else g.call(aten.mul.Tensor, w, -1.5)


MOVED: list[Weight] = [
    _rows_of_a_split,
    _columns_of_a_split,
    _reordered,
    _of_a_stack,
    _turned_before_its_scale,
    _negated,
]
