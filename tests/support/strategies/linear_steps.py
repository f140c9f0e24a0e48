"""The steps by which a random graph grows, and the strategy of whole graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from tests.support.strategies.grower import Grower, Params, Size, Value, text_of
from tests.support.strategies.movements import moved
from tests.support.strategies.quant_specs import FLOATS, SEEDS
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.node import Argument

from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.quant.spec import Block

aten = torch.ops.aten

# 65 features are one more than a block of the packed layout has.
_SIZES = [2, 3, 8, 5, 17, 33, 65]
EXACT_ACTS: list[tuple[OpOverload, tuple[Argument, ...]]] = [
    (aten.relu.default, ()),
    (aten.hardtanh.default, (-1.5, 2.0)),
    (aten.clamp.default, (-0.5, None)),
    (aten.clamp.default, (None, 0.75)),
    (aten.clamp.default, (0, None)),
    (aten.clamp.default, (0.0, 6.0)),
    (aten.leaky_relu.default, (0.25,)),
    (aten.neg.default, ()),
    (aten.clamp_max.default, (0.5,)),
    (aten.clamp_min.default, (-1,)),
]
ACTS: list[tuple[OpOverload, tuple[Argument, ...]]] = [
    *EXACT_ACTS,
    (aten.gelu.default, ()),
    (aten.silu.default, ()),
    (aten.sigmoid.default, ()),
    (aten.tanh.default, ()),
    (aten.hardswish.default, ()),
    (aten.hardsigmoid.default, ()),
    (aten.leaky_relu.default, ()),
    (aten.hardtanh.default, ()),
    (aten.elu.default, (0.7,)),
    (aten.selu.default, ()),
    (aten.celu.default, (0.5,)),
    (aten.mish.default, ()),
]


@dataclass(frozen=True)
class Case:
    """A random graph with what it is run on.

    Attributes:
        program: The graph.
        sizes: Values of its symbolic sizes.
        exact: Whether every sum in it is exact.
        seed: Of the inputs.
    """

    program: NormalGraph
    sizes: dict[str, int]
    exact: bool
    seed: int

    def __repr__(self) -> str:
        text = to_text(self.program.graph)
        return f"Case(exact={self.exact}, sizes={self.sizes}, seed={self.seed}):\n{text}\n"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Hypothesis prints dataclasses field by field unless they say otherwise."""
        del cycle
        printer.text(repr(self))

    def inputs(self) -> list[torch.Tensor]:
        """Inputs of the drawn sizes, the same ones every time."""
        random = torch.Generator().manual_seed(self.seed)
        tensors = []
        for spec in self.program.signature.inputs:
            shape = [s if isinstance(s, int) else self.sizes[s] for s in spec.shape]
            if self.exact:
                value = torch.randint(-127, 128, shape, generator=random) / 8
            else:
                value = torch.randn(shape, generator=random)
            tensors.append(value.to(spec.dtype))
        return tensors


@st.composite
def cases(draw: st.DrawFn, *, exact: bool) -> Case:
    """A random graph: inputs, up to a dozen steps, some of its values as outputs."""
    g = Grower(draw, exact, symbolic=draw(st.integers(0, 2)) == 2)
    for _ in range(draw(st.integers(1, 2))):
        _input(g)
    for _ in range(draw(st.integers(1, 6))):
        g.pick(_STEPS)(g)
    outs = [g.values[-1].node]
    others = [v.node for v in g.values] + [q for q, _ in g.stored]
    outs += [g.pick(others[::-1]) for _ in range(draw(st.integers(0, 2)))]
    sizes = {name: draw(st.sampled_from([3, 1, 2, 7])) for name in ("m", "n")}
    return Case(g.done(*outs), sizes, exact, draw(SEEDS))


def _input(g: Grower) -> None:
    named: list[int | str] = ["m", "n"] if g.symbolic else []
    rank = g.pick([2, 3, 4]) if g.usual() else 1
    lead = [g.pick([3, *named, 2, 4]) if g.usual() else 1 for _ in range(rank - 1)]
    if g.chance(12) and lead:
        lead[0] = 0
    last = g.pick([8, 5, 16, 33, 4]) if g.usual() else 1
    dtype = torch.float32 if g.exact else g.pick([torch.float32, torch.float32, torch.bfloat16])
    g.input([*lead, last], dtype)


def _quantize(g: Grower) -> None:
    """Quantize and dequantize a value: statically, dynamically, or as another one is."""
    x = g.value()
    if x is None:
        return
    params = _params(g, x)
    q = g.quantize(x.node, params)
    if g.chance(4):
        _move_stored(g, q, params)
        return
    if g.chance(6) and not g.exact:
        params = replace(params, spec=replace(params.spec, float_dtype=g.pick(FLOATS)))
    g.dequantize(q, params)
    if g.chance(6):
        # A second reader, as exported graphs have one dequantize per consumer.
        g.dequantize(q, params)


def _params(g: Grower, x: Value) -> Params:
    sizes, real = g.sizes(x), dtype_of(x.node)
    whole: Block = (None,) * len(sizes)
    plain = [p for _, p in g.stored if p.outer is None]
    known = [p for p in plain if p.spec.block == whole and p.spec.float_dtype == real]
    if known and g.chance(3):
        return g.pick(known[::-1])
    if not g.exact and real in FLOATS and g.chance(4):
        return g.mx_params(x.node, sizes, real)
    if g.exact or real not in FLOATS or g.draw(st.booleans()):
        return g.static_params(sizes, real)
    return g.dynamic_params(x.node, sizes, real)


def _twin(g: Grower) -> None:
    """Quantize what is quantized already with parameters that have equal bits."""
    if not g.stored:
        return
    q, params = g.pick(g.stored[::-1])
    if q.target is not torch.ops.qfuse.quantize.default:
        return
    x = q.all_input_nodes[0]
    copies = [_copy(g, part) for part in (params.scale, params.zero, params.outer)]
    assert copies[0] is not None, "a scale is a node"
    twin = Params(params.spec, copies[0], copies[1], copies[2])
    g.dequantize(g.quantize(x, twin), twin)


def _copy(g: Grower, node: Node | None) -> Node | None:
    if node is None or node.op != "get_attr":
        return node
    value = g.b.module.get_buffer(str(node.target))
    return g.b.const(g.name("copy"), value.clone())


def _move_stored(g: Grower, q: Node, params: Params) -> None:
    """Move quantized values that have one scale, then dequantize them."""
    there = moved(g, q)
    fine = any(b is not None for b in params.spec.block) or params.outer is not None
    if fine or there is None:
        g.dequantize(q, params)
        return
    rank = len(shape_of(there))
    ones: Block = (None,) * rank
    scale, zero = (_reshaped(g, part, rank) for part in (params.scale, params.zero))
    assert scale is not None, "a scale is a node"
    g.dequantize(there, Params(params.spec.with_block(ones), scale, zero))


def _reshaped(g: Grower, node: Node | None, rank: int) -> Node | None:
    if node is None:
        return None
    return g.b.call(aten.reshape.default, node, [1] * rank)


def _linear(g: Grower) -> None:
    """A linear with a weight of its own, a shared one, or a float one."""
    x = g.value(lambda v: _multiplies(g, v))
    if x is None:
        return
    k, real = int(g.sizes(x)[-1]), dtype_of(x.node)
    weight = _weight(g, k, real)
    n = int(weight.meta["val"].shape[0])
    bias: tuple[Node, ...] = ()
    if g.draw(st.booleans()):
        size = 1 if g.chance(8) else n
        bias = (g.b.const(g.name("bias"), g.numbers((size,), real)),)
    g.add(g.b.call(aten.linear.default, x.node, weight, *bias))


def _multiplies(g: Grower, x: Value) -> bool:
    """Whether a linear can read a value; its sums may have to be exact in float32."""
    sizes = g.sizes(x)
    if not g.is_float(x) or not sizes or not isinstance(sizes[-1], int):
        return False
    return not g.exact or (x.coarse and dtype_of(x.node) is torch.float32)


def _weight(g: Grower, k: int, float_dtype: torch.dtype) -> Node:
    if g.chance(8):
        return g.b.const(g.name("w"), g.numbers((g.pick(_SIZES), k), float_dtype))
    shared = [
        (q, p)
        for q, p in g.weights
        if q.meta["val"].shape[1] == k and p.spec.float_dtype == float_dtype
    ]
    if shared and g.chance(2):
        q, params = g.pick(shared[::-1])
        if g.chance(2):
            q = g.b.const(str(q.target), g.b.module.get_buffer(str(q.target)))
    else:
        q, params = g.weight_params(g.pick(_SIZES) if g.usual() else 1, k, float_dtype)
    node = g.dequantize(q, params).node
    g.values.pop()
    return node


def _block(g: Grower) -> None:
    """What models are made of: quantize, linear, what follows it."""
    if g.draw(st.integers(0, 3)):
        _quantize(g)
    _linear(g)
    for _ in range(g.draw(st.integers(0, 3))):
        g.pick([_act, _sum, _cast])(g)
    if g.chance(3):
        _quantize(g)


def _act(g: Grower) -> None:
    x = g.value()
    if x is None:
        return
    op, args = g.pick(EXACT_ACTS if g.exact else ACTS)
    kwargs: dict[str, Argument] = {}
    if op is aten.gelu.default and g.chance(2):
        kwargs["approximate"] = "tanh"
    g.add(g.b.call(op, x.node, *args, **kwargs))


def _sum(g: Grower) -> None:
    """A residual sum, a product, or something like one."""
    x = g.value()
    if x is None:
        return
    other = _summand(g, x)
    op = aten.add.Tensor if g.usual() else g.pick([aten.mul.Tensor, aten.sub.Tensor])
    kwargs: dict[str, Argument] = {}
    if op is not aten.mul.Tensor and g.chance(2):
        kwargs["alpha"] = g.pick([2, -0.5, 0] if g.exact else [2, -0.5, 0, 0.3])
    pair = (x.node, other)
    if isinstance(other, torch.fx.Node) and g.draw(st.booleans()):
        pair = (other, x.node)
    g.add(g.b.call(op, *pair, **kwargs))


def _summand(g: Grower, x: Value) -> Argument:
    sizes = g.sizes(x)
    alike = [v.node for v in g.values if _broadcasts(g.sizes(v), sizes) and g.is_float(v)]
    kind = "residual" if g.chance(2) else g.pick(["value", "constant", "self", "number"])
    match kind:
        case "residual" if (known := g.shape(x.node)) is not None:
            return g.input(known, g.pick([torch.float32, dtype_of(x.node)])).node
        case "self":
            return x.node
        case "number":
            return g.pick([1.5, 2, -0.25])
        case "constant":
            shape = [s if isinstance(s, int) else 1 for s in sizes][g.pick([0, -1]) :]
            return g.b.const(g.name("c"), g.numbers(shape, dtype_of(x.node)))
        case _:
            return g.pick(alike[::-1])


def _broadcasts(a: Sequence[Size], b: Sequence[Size]) -> bool:
    pairs = zip(reversed(text_of(a)), reversed(text_of(b)), strict=False)
    return all(x == y or "1" in {x, y} for x, y in pairs)


def _cast(g: Grower) -> None:
    x = g.value()
    if x is None:
        return
    dtype = g.pick([torch.bfloat16, torch.float32, torch.float16, torch.float64])
    g.add(g.b.call(aten._to_copy.default, x.node, dtype=dtype))


def _move(g: Grower) -> None:
    x = g.value(lambda _: True)
    assert x is not None, "there is always an input"
    node = moved(g, x.node)
    if node is not None:
        g.add(node, coarse=x.coarse)


_STEPS: list[Callable[[Grower], None]] = [
    _block,
    _quantize,
    _block,
    _block,
    _act,
    _sum,
    _cast,
    _move,
    _twin,
]
