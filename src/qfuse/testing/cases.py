"""Small graphs over op, granularity and dtype, for checking backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch.fx import Node
from torch.fx.node import Argument

from qfuse.ir.aten import aten
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.ir.quant.spec import QuantSpec
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_channel, per_tensor, per_token, stored_like

_IN, _OUT, _GROUP = 16, 12, 4


@dataclass(frozen=True, slots=True)
class BackendCase:
    """One graph of the battery.

    Attributes:
        name: What it computes: op, granularities and dtypes.
        build: Adds it to a builder and returns its output.
        sizes: The symbolic sizes that it is run with, each by name; one run per entry.
    """

    name: str
    build: Callable[[GraphBuilder], Node]
    sizes: tuple[Mapping[str, int], ...] = field(default=({},))

    def program(self) -> NormalGraph:
        """Build the graph, with new random constants."""
        b = GraphBuilder()
        return b.done(self.build(b))


def battery() -> Iterator[BackendCase]:
    """Yield the cases: products, quantization ops, pools, sums and other ops."""
    yield from _linears()
    yield from _convolutions()
    yield from _matmuls()
    yield from _conversions()
    yield from _others()


def _weights() -> dict[str, QuantSpec]:
    channel = per_channel()
    return {
        "int8 per-tensor": per_tensor(2),
        "int8 per-channel": channel,
        "int8[-127,127] per-channel": replace(channel, quant_min=-127),
        "uint8 per-channel": per_channel(dtype=torch.uint8),
        "int4 per-channel": replace(channel, quant_min=-8, quant_max=7),
        "int8 per-group": channel.with_block((1, _GROUP)),
        "int8 per-block": channel.with_block((3, _GROUP)),
    }


_ACTIVATIONS: dict[str, QuantSpec | None] = {
    "float32": None,
    "int8 per-tensor": per_tensor(2),
    "uint8 per-tensor": per_tensor(2, torch.uint8),
    "int8 per-token dynamic": per_token(2),
}
_OUTPUTS: dict[str, QuantSpec | None] = {
    "float32": None,
    "int8 per-tensor": per_tensor(2),
    "uint8 per-tensor": per_tensor(2, torch.uint8),
    "uint8[10,200] per-tensor": replace(per_tensor(2, torch.uint8), quant_min=10, quant_max=200),
}
_STEPS: dict[str, Callable[[GraphBuilder, Node], Node]] = {
    "relu": lambda b, y: b.call(aten.relu.default, y),
    "hardtanh": lambda b, y: b.call(aten.hardtanh.default, y, 0.0, 6.0),
    "gelu": lambda b, y: b.call(aten.gelu.default, y),
    "silu": lambda b, y: b.call(aten.silu.default, y),
    "hardswish": lambda b, y: b.call(aten.hardswish.default, y),
    "sigmoid": lambda b, y: b.call(aten.sigmoid.default, y),
    "quantized add": lambda b, y: b.call(aten.add.Tensor, y, _other(b, y)),
    "quantized add, relu": lambda b, y: b.call(
        aten.relu.default, b.call(aten.add.Tensor, y, _other(b, y))
    ),
    "quantized mul": lambda b, y: b.call(aten.mul.Tensor, y, _other(b, y)),
}


def _linears() -> Iterator[BackendCase]:
    dynamic = ({"n": 1}, {"n": 7})
    for x in _ACTIVATIONS:
        for weight in _weights():
            for out in _OUTPUTS:
                name = f"linear: {x} x {weight} -> {out}"
                yield BackendCase(name, partial(_linear, x, weight, out, None), dynamic)
    for step in _STEPS:
        for x, out in (("uint8 per-tensor", "uint8 per-tensor"), ("int8 per-tensor", "float32")):
            name = f"linear: {x} x int8 per-channel | {step} -> {out}"
            yield BackendCase(name, partial(_linear, x, "int8 per-channel", out, step), dynamic)


def _linear(x: str, weight: str, out: str, step: str | None, b: GraphBuilder) -> Node:
    quantized = _dynamic if x.endswith("dynamic") else _activation
    real = quantized(b, b.arg("x", torch.float32, "n", _IN), _ACTIVATIONS[x])
    spec = _weights()[weight]
    w = _weight(b, spec, (_OUT, _IN), zero=spec.dtype is torch.uint8)
    y = b.call(aten.linear.default, real, w, b.const("bias", torch.randn(_OUT)))
    y = y if step is None else _STEPS[step](b, y)
    return _quantize(b, y, _OUTPUTS[out], "out")


_GEOMETRIES: dict[str, tuple[tuple[int, ...], tuple[Argument, ...], int]] = {
    "1x1": ((12, 8, 1, 1), ([1, 1], [0, 0]), 8),
    "3x3, padding 1": ((12, 8, 3, 3), ([1, 1], [1, 1]), 8),
    "3x3, stride 2": ((12, 8, 3, 3), ([2, 2], [1, 1]), 8),
    "3x2, dilation 2": ((12, 8, 3, 2), ([1, 1], [2, 1], [2, 2]), 8),
    "depthwise 3x3": ((8, 1, 3, 3), ([1, 1], [1, 1], [1, 1], 8), 8),
    "2 groups": ((12, 4, 3, 3), ([1, 1], [1, 1], [1, 1], 2), 8),
    "1 axis": ((12, 8, 3), ([1], [1]), 8),
}


def _convolutions() -> Iterator[BackendCase]:
    for geometry in _GEOMETRIES:
        for dtype in (torch.uint8, torch.int8):
            name = f"convolution, {geometry}: {dtype} per-tensor x int8 per-channel"
            build = partial(_convolution, geometry, dtype)
            yield BackendCase(f"{name} -> same", partial(build, None))
            yield BackendCase(f"{name} | relu -> same", partial(build, "relu"))
    name = "convolution, 3x3, padding 1: uint8 per-tensor x int8 per-channel"
    for step in _STEPS:
        build = partial(_convolution, "3x3, padding 1", torch.uint8)
        yield BackendCase(f"{name} | {step} -> same", partial(build, step))


def _convolution(geometry: str, dtype: torch.dtype, step: str | None, b: GraphBuilder) -> Node:
    shape, settings, channels = _GEOMETRIES[geometry]
    rank = len(shape)
    x = b.arg("x", torch.float32, 2, channels, *(9, 7)[: rank - 2])
    real = _activation(b, x, per_tensor(rank, dtype))
    w = _weight(b, per_channel(rank), shape)
    conv = aten.conv1d.default if rank == 3 else aten.conv2d.default  # noqa: PLR2004
    y = b.call(conv, real, w, b.const("bias", torch.randn(shape[0])), *settings)
    y = y if step is None else _STEPS[step](b, y)
    return _quantize(b, y, per_tensor(rank, dtype), "out")


def _matmuls() -> Iterator[BackendCase]:
    """Products of two activations, as of queries and keys."""
    dynamic = ({"n": 1}, {"n": 7})
    for left in ("int8 per-tensor", "uint8 per-tensor", "int8 per-token dynamic"):
        for right in ("int8 per-tensor", "uint8 per-tensor"):
            for out in ("float32", "uint8 per-tensor"):
                name = f"matmul: {left} x {right} -> {out}"
                yield BackendCase(name, partial(_matmul, left, right, out), dynamic)


def _matmul(left: str, right: str, out: str, b: GraphBuilder) -> Node:
    quantized = _dynamic if left.endswith("dynamic") else _activation
    x = quantized(b, b.arg("x", torch.float32, "n", _IN), _ACTIVATIONS[left])
    spec = _ACTIVATIONS[right]
    assert spec is not None, "floats are not quantized"
    q, scale, zero = _stored(b, b.arg("keys", torch.float32, _OUT, _IN), spec, "keys")
    keys = b.call(ops.dequantize, q, scale, zero, str(spec))
    y = b.call(aten.matmul.default, x, b.call(aten.transpose.int, keys, 0, 1))
    return _quantize(b, b.call(aten.mul.Tensor, y, 0.25), _OUTPUTS[out], "out")


def _conversions() -> Iterator[BackendCase]:
    specs = {
        "int8 per-tensor": per_tensor(2),
        "uint8 per-tensor": per_tensor(2, torch.uint8),
        "int16 per-tensor": per_tensor(2, torch.int16),
        "int8 per-channel": per_channel(),
        "int8 per-group": per_tensor(2).with_block((1, _GROUP)),
        "int8 per-block": per_tensor(2).with_block((2, _GROUP)),
        "bfloat16 to int8 per-tensor": per_tensor(2, float_dtype=torch.bfloat16),
        "float8 per-tensor": per_tensor(2, torch.float8_e4m3fn),
    }
    for name, spec in specs.items():
        yield BackendCase(f"quantize: {name}", partial(_convert, spec, "quantize"))
        yield BackendCase(f"dequantize: {name}", partial(_convert, spec, "dequantize"))
    for name in ("int8 per-tensor", "uint8 per-tensor", "int8 per-channel"):
        yield BackendCase(f"requantize: {name}", partial(_convert, specs[name], "requantize"))


def _convert(spec: QuantSpec, how: str, b: GraphBuilder) -> Node:
    x = b.arg("x", spec.float_dtype, 6, _IN)
    if how == "quantize":
        return _quantize(b, x, spec, "x")
    real = _activation(b, x, spec)
    if how == "dequantize":
        return b.call(aten.neg.default, real)
    # Another scale, so that the two do not cancel.
    return _quantize(b, real, per_tensor(2), "out")


def _others() -> Iterator[BackendCase]:
    pooled: dict[str, Callable[[GraphBuilder, Node], Node]] = {
        "max_pool2d": lambda b, x: b.call(aten.max_pool2d.default, x, [3, 2], [2, 1], [1, 0]),
        "avg_pool2d": lambda b, x: b.call(aten.avg_pool2d.default, x, [3, 3], [1, 1]),
        "avg_pool2d, padding": lambda b, x: b.call(
            aten.avg_pool2d.default, x, [3, 2], [2, 1], [1, 1], True, False
        ),
        "avg_pool2d, divisor": lambda b, x: b.call(
            aten.avg_pool2d.default, x, [2, 2], [], [1, 0], False, True, 3
        ),
        "adaptive_avg_pool2d": lambda b, x: b.call(aten.adaptive_avg_pool2d.default, x, [2, 3]),
        "mean": lambda b, x: b.call(aten.mean.dim, x, [2, 3], True),
        "add": lambda b, x: b.call(aten.add.Tensor, x, _other(b, x)),
        "add, relu": lambda b, x: b.call(
            aten.relu.default, b.call(aten.add.Tensor, x, _other(b, x))
        ),
        "add with alpha": lambda b, x: b.call(aten.add.Tensor, x, _other(b, x), alpha=2),
        "add of itself": lambda b, x: b.call(aten.add.Tensor, x, x),
        "sub": lambda b, x: b.call(aten.sub.Tensor, x, _other(b, x)),
        "sub with alpha": lambda b, x: b.call(aten.sub.Tensor, x, _other(b, x), alpha=3),
        "mul": lambda b, x: b.call(aten.mul.Tensor, x, _other(b, x)),
        "mul, hardswish": lambda b, x: b.call(
            aten.hardswish.default, b.call(aten.mul.Tensor, x, _other(b, x))
        ),
        "add a number": lambda b, x: b.call(aten.add.Tensor, x, 0.75),
        "mul by a number": lambda b, x: b.call(aten.mul.Tensor, x, -1.5),
        "add of channels": lambda b, x: b.call(
            aten.add.Tensor, x, b.const("channels", torch.randn(8, 1, 1))
        ),
        "relu": lambda b, x: b.call(aten.relu.default, x),
        "clamp": lambda b, x: b.call(aten.clamp.default, x, -0.5, 1.5),
        "cat": lambda b, x: b.call(aten.cat.default, [x, _other(b, x)], 1),
        "softmax": lambda b, x: b.call(aten.softmax.int, x, -1),
        "masked softmax": lambda b, x: b.call(
            aten.softmax.int, b.call(aten.add.Tensor, x, b.const("mask", torch.randn(9, 7))), -1
        ),
        "attention": _attention,
        "masked attention": lambda b, x: _attention(b, x, b.const("mask", torch.randn(9, 9))),
        "causal attention": lambda b, x: _attention(b, x, None, 0.0, True),
        "view": lambda b, x: b.call(aten.view.default, x, [2, 8, 63, 1]),
        "layer_norm": lambda b, x: b.call(aten.layer_norm.default, x, [7]),
        "silu": lambda b, x: b.call(aten.silu.default, x),
    }
    for name, op in pooled.items():
        for dtype in (torch.int8, torch.uint8):
            yield BackendCase(f"{name}: {dtype} per-tensor -> same", partial(_between, op, dtype))


def _between(op: Callable[[GraphBuilder, Node], Node], dtype: torch.dtype, b: GraphBuilder) -> Node:
    """Add an op between a dequantize and a quantize."""
    x = _activation(b, b.arg("x", torch.float32, 2, 8, 9, 7), per_tensor(4, dtype))
    return _quantize(b, op(b, x), per_tensor(4, dtype), "out")


def _attention(b: GraphBuilder, x: Node, *more: Argument) -> Node:
    """Add an attention whose keys are another input."""
    return b.call(aten.scaled_dot_product_attention.default, x, _other(b, x), x, *more)


def _activation(b: GraphBuilder, x: Node, spec: QuantSpec | None) -> Node:
    """Add a quantize and a dequantize of ``x``."""
    if spec is None:
        return x
    q, scale, zero = _stored(b, x, spec, "x")
    return b.call(ops.dequantize, q, scale, zero, str(spec))


def _dynamic(b: GraphBuilder, x: Node, spec: QuantSpec | None) -> Node:
    assert spec is not None, "floats are not quantized"
    low, high = spec.quant_min, spec.quant_max
    choose = ChooseSpec(Formula.AO_SYMMETRIC, spec.dtype, low, high, spec.block, 1e-6)
    chosen = b.call(ops.choose_qparams, x, str(choose))
    scale = b.item(chosen, 0)
    q = b.call(ops.quantize, x, scale, None, str(spec))
    return b.call(ops.dequantize, q, scale, None, str(spec))


def _quantize(b: GraphBuilder, y: Node, spec: QuantSpec | None, name: str) -> Node:
    return y if spec is None else _stored(b, y, spec, name)[0]


def _other(b: GraphBuilder, like: Node) -> Node:
    """Add another input of the same shape, quantized with parameters of its own."""
    sizes: list[int | str] = [s if isinstance(s, int) else "n" for s in like.meta["val"].shape]
    spec = per_tensor(len(sizes), torch.uint8)
    q, scale, zero = _stored(b, b.arg("other", torch.float32, *sizes), spec, "other")
    return b.call(ops.dequantize, q, scale, zero, str(spec))


def _stored(b: GraphBuilder, x: Node, spec: QuantSpec, name: str) -> tuple[Node, Node, Node | None]:
    """Add a static quantize whose range most values of a normal distribution lie in."""
    grid = spec.grid([int(s) if isinstance(s, int) else 1 for s in x.meta["val"].shape])
    levels = min(spec.quant_max - spec.quant_min, 255)
    scale = b.const(f"{name}_scale", (torch.rand([int(g) for g in grid]) + 6) / levels)
    zero = None
    if not spec.dtype.is_floating_point:
        # Off the middle, so that a backend that forgets the zero point is found.
        middle = (spec.quant_min + spec.quant_max + 1) // 2 + 3
        zero = b.const(
            f"{name}_zero", torch.full([int(g) for g in grid], middle, dtype=torch.int32)
        )
    return b.call(ops.quantize, x, scale, zero, str(spec)), scale, zero


def _weight(
    b: GraphBuilder, spec: QuantSpec, shape: tuple[int, ...], *, zero: bool = False
) -> Node:
    """Add a dequantized constant weight."""
    grid = [int(g) for g in spec.grid(shape)]
    scale = b.const("w_scale", torch.rand(grid) * 0.005 + 2e-3)
    point = b.const("w_zero", torch.full(grid, 120, dtype=torch.int32)) if zero else None
    return b.call(ops.dequantize, b.const("w", stored_like(spec, *shape)), scale, point, str(spec))
