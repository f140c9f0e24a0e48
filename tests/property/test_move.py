"""Quantization moves through random graphs of movements without changing a bit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.normalize.sources import difference, equal_but_for_nan, results, strides
from tests.property.grower import Grower, Params, text_of
from tests.property.movements import moved
from tests.property.specs import SEEDS
from tests.property.steps import Case

from qfuse.cost import CostModel, CostProfile
from qfuse.ir.blocks import block_grid
from qfuse.ir.events import Exactness, RolledBack
from qfuse.ir.text import to_text
from qfuse.ir.verify import verify
from qfuse.ir.views import dtype_of, shape_of
from qfuse.optimize.combine import Combine
from qfuse.optimize.schedule import MOVING_RULES, move
from qfuse.rewrite.clone import clone
from qfuse.rewrite.driver import Context, apply_rules
from qfuse.rewrite.gate import Gate
from qfuse.rewrite.site_check import SiteChecker
from qfuse.testing.run import run

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Sequence

    from torch.fx import Node
    from torch.fx.node import Argument

    from qfuse.ir.program import NormalGraph
    from qfuse.ir.quant_spec import Block
    from qfuse.ir.sizes import Size
    from qfuse.rewrite.rewriter import Journal

pytestmark = [pytest.mark.property, pytest.mark.numeric]

aten = torch.ops.aten


@st.composite
def cases(draw: st.DrawFn) -> Case:
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
    return Case(g.b.done(*outs), sizes, exact=False, seed=draw(SEEDS))


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


_MORE: list[Callable[[Grower, Node], Node | None]] = [
    *(_view, _cat, _part, _view, _stack, _pad),
    *(_flip, _roll, _repeat, _index),
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
    known = [p for _, p in g.stored if p.spec.real == real and _fits(p, sizes)]
    if known and g.chance(2):
        return g.pick(known[::-1])
    if g.chance(3):
        return g.micro_params(x, sizes, real)
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
    """Move stored numbers that have one scale."""
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
        if p.spec.real == dtype_of(v.node) and _fits(p, shape_of(v.node))
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
        g.add(g.b.call(g.pick([aten.relu.default, aten.neg.default]), x.node))


_STEPS: list[Callable[[Grower], None]] = [_quantize, _move, _quantize, _move, _move, _again, _act]


def moved_phase(program: NormalGraph, *, priced: bool) -> Counter[str]:
    """Run the phase as the schedule does."""
    cost = CostModel(CostProfile.pinned()) if priced else None
    context = Context("optimize", cost)
    Combine().run(program, context)
    return move(program, context)


def assert_unchanged(case: Case, program: NormalGraph) -> None:
    """Assert that all outputs have the bits, the types and the strides that they had."""
    inputs = case.inputs()
    before, after = run(case.program, inputs), run(program, inputs)
    for old, new, node in zip(before, after, results(program), strict=True):
        same = old.dtype == new.dtype and old.shape == new.shape and equal_but_for_nan(old, new)
        assert same, f"{to_text(program.graph)}\n{difference(old, new)}"
        assert strides(old) == strides(new), f"strides of {node}\n{to_text(program.graph)}"


@pytest.mark.parametrize("priced", [False, True], ids=["free", "priced"])
@given(case=cases())
def test_moving_keeps_every_bit_and_comes_to_rest(priced: bool, case: Case) -> None:
    verify(case.program)
    program = clone(case.program)
    moved_phase(program, priced=priced)

    verify(program)
    assert_unchanged(case, program)
    text = to_text(program.graph)
    assert not moved_phase(program, priced=priced), f"{text}\n-->\n{to_text(program.graph)}"
    assert to_text(program.graph) == text


class RefuseAll:
    """A checker to which nothing is right."""

    def check(self, journal: Journal, exactness: Exactness, what: str) -> str | None:
        del journal, exactness
        return f"{what} is not wanted"

    def forget(self, nodes: Sequence[Node]) -> None:
        del nodes


@given(case=cases())
def test_undone_rewrites_leave_no_trace(case: Case) -> None:
    program = clone(case.program)
    before = to_text(program.graph)
    context = Context("optimize", checker=RefuseAll())

    assert not apply_rules(program, [rule() for rule in MOVING_RULES], context).modified
    assert to_text(program.graph) == before
    verify(program)


@given(case=cases(), fuel=st.integers(0, 8))
def test_any_number_of_rewrites_keeps_every_bit(case: Case, fuel: int) -> None:
    program = clone(case.program)
    inputs = case.inputs()
    checker = SiteChecker(program, inputs)
    context = Context("optimize", gate=Gate(fuel), checker=checker)
    move(program, context)

    verify(program)
    assert not program.log.of(RolledBack)
    assert_unchanged(case, program)
