"""The steps by which a graph of movements around quantization grows, and the strategy of such graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from tests.support.strategies.grower import Grower, Params, text_of
from tests.support.strategies.linear_steps import Case
from tests.support.strategies.movements import moved
from tests.support.strategies.quant_specs import SEEDS
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.node import Argument

from qfuse.ir.ops import library as ops
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.quant.block import block_grid
from qfuse.ir.quant.spec import Block
from qfuse.ir.sizes import Size

aten = torch.ops.aten


@st.composite
def move_cases(draw: st.DrawFn) -> Case:
    """A graph of movements around quantizes and dequantizes."""
    g = Grower(draw, exact=False, symbolic=draw(st.integers(0, 3)) == 3)
    named: list[int | str] = ["m", "n"] if g.symbolic else []
    rank = g.pick([2, 3, 1, 4])
    shape = [g.pick([4, 6, *named, 2, 1, 3]) for _ in range(rank)]
    g.input(shape, g.pick([torch.float32, torch.float32, torch.bfloat16]))
    for _ in range(draw(st.integers(2, 9))):
        g.pick(_STEPS)(g)
    outs = [_consumed(g, g.values[-1].node)]
    others = [v.node for v in g.values] + [q for q, _ in g.stored]
    outs += [_consumed(g, g.pick(others[::-1])) for _ in range(draw(st.integers(0, 3)))]
    sizes = {name: draw(st.sampled_from([3, 1, 2, 7])) for name in ("m", "n")}
    return Case(g.done(*outs), sizes, exact=False, seed=draw(SEEDS))


def _consumed(g: Grower, node: Node) -> Node:
    """Read a value by an op, or let it leave the graph as it is."""
    if g.chance(3):
        return node
    if node.meta["val"].is_floating_point() and node.meta["val"].dtype.itemsize > 1:
        return g.b.call(aten.neg.default, node)
    return g.b.call(aten._to_copy.default, node, dtype=torch.float32)


def _move(g: Grower) -> None:
    x = g.value()
    assert x is not None, "there is always an input"
    node = _moved(g, x.node)
    if node is not None and node.meta["val"].numel() != 0:
        g.add(node)


def _moved(g: Grower, x: Node) -> Node | None:
    return moved(g, x) if g.chance(2) else g.pick(_MORE)(g, x)


def _axis(g: Grower, x: Node) -> int | None:
    """An axis of a known size, if there is one."""
    known = [a for a, size in enumerate(shape_of(x)) if isinstance(size, int) and size]
    return g.pick(known) if known else None


def _view(g: Grower, x: Node) -> Node | None:
    """A view in any other known sizes."""
    sizes = [int(s) for s in shape_of(x) if isinstance(s, int)]
    if len(sizes) < len(shape_of(x)):
        return None
    count = x.meta["val"].numel()
    shapes = [
        [count],
        [2, count // 2],
        [count // 3, 3],
        [2, count // 4, 2],
        [1, *sizes],
        [1, count, 1],
    ]
    fitting = [s for s in shapes if torch.Size(s).numel() == count]
    return g.b.call(aten.reshape.default, x, list(g.pick(fitting)))


def _flip(g: Grower, x: Node) -> Node | None:
    axis = _axis(g, x)
    return None if axis is None else g.b.call(aten.flip.default, x, [axis])


def _roll(g: Grower, x: Node) -> Node | None:
    axis = _axis(g, x)
    return None if axis is None else g.b.call(aten.roll.default, x, [g.pick([1, 2])], [axis])


def _repeat(g: Grower, x: Node) -> Node | None:
    return g.b.call(aten.repeat.default, x, [g.pick([1, 2]) for _ in shape_of(x)])


def _index(g: Grower, x: Node) -> Node | None:
    axis = _axis(g, x)
    if axis is None:
        return None
    last = int(shape_of(x)[axis]) - 1
    index = torch.tensor(g.draw(st.lists(st.integers(0, last), min_size=1, max_size=3)))
    return g.b.call(aten.index_select.default, x, axis, g.b.const(g.name("index"), index))


def _part(g: Grower, x: Node) -> Node | None:
    axis = _axis(g, x)
    if axis is None:
        return None
    parts = g.b.call(aten.split.Tensor, x, g.pick([2, 1, 3]), axis)
    count = len(parts.meta["val"])
    made = [g.b.item(parts, i) for i in range(count) if i == 0 or g.chance(2)]
    for part in made:
        g.add(part)
    return made[-1]


def _pad(g: Grower, x: Node) -> Node | None:
    # Fake tensors take the sizes of what is padded for numbers.
    if not shape_of(x) or not all(isinstance(size, int) for size in shape_of(x)):
        return None
    value = g.pick([0, 0.0, -1.5, -0.0]) if dtype_of(x).is_floating_point else 3
    pads = [g.pick([0, 1, 2]) for _ in range(2 * g.pick([1, min(2, len(shape_of(x)))]))]
    return g.b.call(aten.constant_pad_nd.default, x, pads, value)


def _cat(g: Grower, x: Node) -> Node | None:
    return _joined(g, x, aten.cat.default)


def _stack(g: Grower, x: Node) -> Node | None:
    return _joined(g, x, aten.stack.default) if len(shape_of(x)) < 4 else None


def _joined(g: Grower, x: Node, op: torch._ops.OpOverload) -> Node | None:
    if not shape_of(x):
        return None
    sizes = text_of(shape_of(x))
    alike = [v.node for v in g.values if text_of(shape_of(v.node)) == sizes]
    same = [node for node in alike if dtype_of(node) == dtype_of(x)] + [x]
    parts: list[Argument] = [x, *(g.pick(same) for _ in range(g.pick([1, 2])))]
    return g.b.call(op, parts, g.pick([0, -1]))


def _unfold(g: Grower, x: Node) -> Node | None:
    axis = _axis(g, x)
    if axis is None or len(shape_of(x)) > 3:
        return None
    size = g.pick([2, 1, 3])
    if int(shape_of(x)[axis]) < size:
        return None
    return g.b.call(aten.unfold.default, x, axis, size, g.pick([1, 2, 3]))


def _gather(g: Grower, x: Node) -> Node | None:
    axis = _axis(g, x)
    sizes = [int(size) for size in shape_of(x) if isinstance(size, int)]
    if axis is None or len(sizes) < len(shape_of(x)):
        return None
    below, sizes[axis] = sizes[axis], g.pick([2, 1, 3])
    index = g.b.const(g.name("index"), _indices(g, sizes, below))
    return g.b.call(aten.gather.default, x, axis, index)


def _take(g: Grower, x: Node) -> Node | None:
    """Indices of any rank, and rows of a table."""
    axis = _axis(g, x)
    if axis is None:
        return None
    shape = g.pick([[2], [2, 3], []] if len(shape_of(x)) < 4 else [[2], []])
    index = g.b.const(g.name("index"), _indices(g, shape, int(shape_of(x)[axis])))
    if axis == 0 and len(shape_of(x)) == 2 and g.chance(2):
        return g.b.call(aten.embedding.default, x, index)
    return g.b.call(aten.index.Tensor, x, [*[None] * axis, index])


def _indices(g: Grower, shape: Sequence[int], below: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(g.draw(SEEDS))
    return torch.randint(0, below, tuple(shape), generator=random)


def _diagonal(g: Grower, x: Node) -> Node | None:
    if len(shape_of(x)) < 2 or not all(isinstance(size, int) for size in shape_of(x)):
        return None
    first, second, *_ = g.draw(st.permutations(range(len(shape_of(x)))))
    return g.b.call(aten.diagonal.default, x, g.pick([0, 1, -1]), first, second)


def _repeat_each(g: Grower, x: Node) -> Node | None:
    axis = _axis(g, x)
    return None if axis is None else g.b.call(aten.repeat_interleave.self_int, x, 2, axis)


def _edge_pad(g: Grower, x: Node) -> Node | None:
    last = shape_of(x)[-1] if len(shape_of(x)) in {2, 3} else None
    if not isinstance(last, int) or last < 2 or not all(isinstance(s, int) for s in shape_of(x)):
        return None
    mode = g.pick(["reflect", "replicate", "circular"])
    return g.b.call(aten.pad.default, x, [g.pick([1, 0]), g.pick([0, 1])], mode)


def _unbind(g: Grower, x: Node) -> Node | None:
    axis = _axis(g, x)
    if axis is None:
        return None
    parts = g.b.call(aten.unbind.int, x, axis)
    made = [g.b.item(parts, i) for i in range(len(parts.meta["val"])) if i == 0 or g.chance(2)]
    for part in made:
        g.add(part)
    return made[-1]


_MORE: list[Callable[[Grower, Node], Node | None]] = [
    *(_view, _cat, _part, _view, _stack, _pad),
    *(_flip, _roll, _repeat, _index),
    *(_unfold, _gather, _take, _diagonal, _repeat_each, _edge_pad, _unbind),
]


def _quantize(g: Grower) -> None:
    x = g.value()
    assert x is not None, "there is always an input"
    params = _params(g, x.node)
    q = g.quantize(x.node, params)
    if g.chance(3) and (there := _moved_stored(g, q, params)) is not None:
        q, params = there
        g.stored.append((q, params))
    if not g.chance(4):
        g.dequantize(q, params)


def _params(g: Grower, x: Node) -> Params:
    """Parameters like those of something else that has them, or new ones."""
    sizes, real = shape_of(x), dtype_of(x)
    known = [p for _, p in g.stored if p.spec.float_dtype == real and _fits(p, sizes)]
    if known and g.chance(2):
        return g.pick(known[::-1])
    if g.chance(3):
        return g.mx_params(x, sizes, real)
    if g.chance(2):
        return g.dynamic_params(x, sizes, real)
    return g.static_params(sizes, real)


def _fits(params: Params, sizes: Sequence[Size]) -> bool:
    if len(params.spec.block) != len(sizes):
        return False
    if text_of(params.spec.grid(sizes)) != text_of(shape_of(params.scale)):
        return False
    outer = params.spec.outer
    if outer is None or params.outer is None:
        return True
    return text_of(block_grid(outer, sizes)) == text_of(shape_of(params.outer))


def _moved_stored(g: Grower, q: Node, params: Params) -> tuple[Node, Params] | None:
    """Move quantized values that have one scale."""
    if params.outer is not None:
        return None
    if any(b is not None for b in params.spec.block) or q.meta["val"].dtype.is_floating_point:
        return None
    there = _moved(g, q)
    g.values = [v for v in g.values if v.node.meta["val"].dtype is not q.meta["val"].dtype]
    if there is None or there.meta["val"].numel() == 0:
        return None
    ones: Block = (None,) * len(shape_of(there))
    parts = [
        None if n is None else g.b.call(aten.reshape.default, n, [1] * len(ones))
        for n in (params.scale, params.zero)
    ]
    assert parts[0] is not None, "a scale is a node"
    return there, Params(params.spec.with_block(ones), parts[0], parts[1])


def _again(g: Grower) -> None:
    """Quantize what was dequantized, with the same parameters."""
    fitting = [
        (v.node, p)
        for v in g.values[-3:]
        for _, p in g.stored[-3:]
        if p.spec.float_dtype == dtype_of(v.node) and _fits(p, shape_of(v.node))
    ]
    if fitting:
        x, params = g.pick(fitting[::-1])
        low = params.spec.quant_min
        if g.chance(4) and params.spec.quant_max > low:
            params = replace(params, spec=replace(params.spec, quant_max=params.spec.quant_max - 1))
        g.dequantize(g.quantize(x, params), params)


def _act(g: Grower) -> None:
    x = g.value()
    if x is not None:
        op, args = g.pick(_ACTS)
        g.add(g.b.call(op, x.node, *args))


_ACTS: list[tuple[OpOverload, tuple[Argument, ...]]] = [
    (aten.relu.default, ()),
    (aten.neg.default, ()),
    (aten.relu6.default, ()),
    (aten.hardtanh.default, (-0.5, 0.75)),
    (aten.clamp.default, (None, 0.25)),
    (aten.clamp.default, (0, None)),
    (aten.clamp_min.default, (-0.125,)),
]


def _cast(g: Grower) -> None:
    x = g.value()
    if x is not None:
        dtype = g.pick([torch.float32, torch.bfloat16, torch.float16])
        if dtype != dtype_of(x.node):
            g.add(g.b.call(aten._to_copy.default, x.node, dtype=dtype))


def _choose_greatest(g: Grower) -> None:
    """The greatest or least of windows, or of an axis."""
    x = g.value()
    if x is None or not shape_of(x.node):
        return
    known = [isinstance(size, int) and size > 1 for size in shape_of(x.node)]
    args: list[Any] = [[2, 3][: g.pick([1, 2])], [g.pick([1, 2])]]
    if len(args[0]) == 1 and len(known) in {2, 3} and known[-1]:
        g.add(g.b.call(aten.max_pool1d.default, x.node, [2], *args[1:], [g.pick([0, 1])]))
    elif len(known) in {3, 4} and all(known[-2:]):
        g.add(g.b.call(aten.max_pool2d.default, x.node, [2, 2], args[1] * 2, [g.pick([0, 1]), 1]))
    elif (axis := _axis(g, x.node)) is not None:
        op = g.pick([aten.amax.default, aten.amin.default])
        g.add(g.b.call(op, x.node, [axis], g.chance(2)))


def _requantize(g: Grower) -> None:
    """Quantized values of other parameters, without real ones between."""
    fitting = [
        (q, p) for q, p in g.stored[-3:] if not p.spec.dtype.is_floating_point and p.spec.is_plain
    ]
    if not fitting:
        return
    q, params = g.pick(fitting[::-1])
    new = g.static_params(shape_of(q), params.spec.float_dtype)
    edges = [(p.scale, p.zero, str(p.spec)) for p in (params, new)]
    made = g.b.call(ops.requantize, q, *edges[0], *edges[1])
    g.stored.append((made, new))
    if not g.chance(3):
        g.dequantize(made, new)


def _two(g: Grower) -> None:
    """Two quantizes of one value, each with parameters of its own."""
    x = g.value()
    assert x is not None, "there is always an input"
    for _ in range(2):
        params = _params(g, x.node)
        g.dequantize(g.quantize(x.node, params), params)


def _share(g: Grower) -> None:
    """Another reader of something that is there."""
    x = g.value(lambda _: True)
    assert x is not None, "there is always an input"
    if x.node.meta["val"].is_floating_point():
        g.add(g.b.call(aten.neg.default, x.node))


def _linear(g: Grower) -> None:
    x = g.value()
    k = shape_of(x.node)[-1] if x is not None and shape_of(x.node) else None
    if x is None or not isinstance(k, int) or not k:
        return
    real = dtype_of(x.node)
    q, params = g.weight_params(g.pick([2, 3]), k, real)
    weight = g.dequantize(q, params).node
    g.values.pop()
    g.add(g.b.call(aten.linear.default, x.node, weight))


_STEPS: list[Callable[[Grower], None]] = [
    *(_quantize, _move, _quantize, _move, _move, _again, _act, _move),
    *(_cast, _choose_greatest, _requantize, _two, _share, _linear),
]
