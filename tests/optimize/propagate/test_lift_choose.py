from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.propagate import Graph, applied, only_miss, spec_of, steps

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.ir.quant.spec import Block
from qfuse.optimize.propagate.lift_choose import LiftChoose
from qfuse.optimize.propagate.lift_quantize import LiftQuantize

aten = torch.ops.aten


def dynamic(g: Graph, x: Any, *block: int | None) -> Any:
    """A dynamic quantize of a value."""
    return g.quantize(x, spec_of(*block), g.choose(x, block))


@pytest.mark.numeric
def test_golden_no_view_of_the_scale_is_left_where_it_is_not_read() -> None:
    g = Graph(2, 6, 8)
    flat = g.call(aten.view.default, g.x, [12, 8])
    program = g.done(g.call(aten._to_copy.default, dynamic(g, flat, 1, None), dtype=torch.int32))

    fired = applied(program, LiftChoose, LiftQuantize).fired
    assert fired == {"lift-choose": 1, "lift-quantize": 1}
    assert steps(program) == [
        *("getitem[2, 6, 1]", "getitem[2, 6, 1]", "quantize[2, 6, 8]"),
        *("reshape[12, 8]", "_to_copy[12, 8]", "_to_copy[12, 8]"),
    ]
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[2, 6, 8]
%0 = qfuse.choose_qparams(%x, 'ao-asymmetric int8[-128,127] 1x1x* eps=1e-07 float32 int32'): (float32[2, 6, 1], int32[2, 6, 1])
%1 = getitem(%0, 0): float32[2, 6, 1]
%2 = getitem(%0, 1): int32[2, 6, 1]
%3 = qfuse.quantize(%x, %1, %2, 'int8[-128,127] 1x1x* float32 float32:reciprocal:round-zp int'): int8[2, 6, 8]
%4 = aten.reshape(%3, (12, 8)): int8[12, 8]
%5 = aten._to_copy(%4, dtype=int32): int32[12, 8]
%6 = aten._to_copy(%5, dtype=float32): float32[12, 8]
return (%6)""",
    )


MOVEMENTS: dict[str, tuple[Any, tuple[Any, ...], Block]] = {
    "rows": (aten.view.default, ([12, 8],), (1, None)),
    "heads": (aten.view.default, ([2, 6, 2, 4],), (1, 1, None, None)),
    "permute": (aten.permute.default, ([2, 0, 1],), (1, None, None)),
    "groups": (aten.view.default, ([12, 8],), (1, 4)),
    "roll": (aten.roll.default, ([2], [1]), (None, 2, None)),
    "tensor": (aten.view.default, ([96],), (None,)),
    "clone": (aten.clone.default, (), (1, 1, None)),
}


@pytest.mark.numeric
@pytest.mark.parametrize("name", list(MOVEMENTS))
def test_blocks_are_mapped_onto_blocks(name: str) -> None:
    op, args, block = MOVEMENTS[name]
    g = Graph(2, 6, 8)
    program = g.done(dynamic(g, g.call(op, g.x, *args), *block))

    fired = applied(program, LiftChoose, LiftQuantize).fired
    assert fired == {"lift-choose": 1, "lift-quantize": 1}
    assert "quantize[2, 6, 8]" in steps(program)


@pytest.mark.numeric
@pytest.mark.parametrize("m", [1, 5])
def test_rows_of_a_dynamic_number(m: int) -> None:
    g = Graph("m", 6, 8)
    program = g.done(dynamic(g, g.call(aten.view.default, g.x, [-1, 8]), 1, None))

    assert applied(program, LiftChoose, LiftQuantize, m=m).fired["lift-choose"] == 1
    kept = [step for step in steps(program) if step.startswith("reshape")]
    assert len(kept) == 3, "the quantized values, and scale and zero point for the dequantize"


@pytest.mark.numeric
def test_copies_of_an_element_choose_like_the_element() -> None:
    g = Graph(2, 1, 8)
    wide = g.call(aten.expand.default, g.x, [2, 3, 8])
    program = g.done(dynamic(g, wide, None, None, None))

    assert applied(program, LiftChoose).fired == {"lift-choose": 1}


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.slice.Tensor, (1, 0, 3)),
        (aten.select.int, (1, 0)),
        (aten.repeat.default, ([1, 2, 1],)),
        (aten.index_select.default, (1, torch.tensor([0, 2]))),
    ],
    ids=["slice", "select", "repeat", "index"],
)
def test_refuses_other_elements(op: Any, args: tuple[Any, ...]) -> None:
    g = Graph(2, 6, 8)
    given = [g.constant(a, "index") if isinstance(a, torch.Tensor) else a for a in args]
    part = g.call(op, g.x, *given)
    program = g.done(dynamic(g, part, *[None] * part.meta["val"].ndim))

    assert only_miss(program, LiftChoose).code is MissCode.GRANULARITY


@pytest.mark.parametrize("op", [aten.cat.default, aten.stack.default])
def test_refuses_joins_without_a_word(op: Any) -> None:
    g = Graph(2, 6, 8)
    joined = g.call(op, [g.x, g.x], 0)
    program = g.done(dynamic(g, joined, *[None] * joined.meta["val"].ndim))

    assert not applied(program, LiftChoose).misses


def test_refuses_blocks_that_are_none_above() -> None:
    g = Graph(2, 6, 8)
    program = g.done(dynamic(g, g.call(aten.view.default, g.x, [12, 8]), 4, None))

    assert only_miss(program, LiftChoose).code is MissCode.GRANULARITY


def test_refuses_a_scale_that_leaves_the_graph() -> None:
    g = Graph(2, 6, 8)
    flat = g.call(aten.view.default, g.x, [12, 8])
    scale, zero = g.choose(flat, (1, None))
    program = g.b.done(scale, g.call(aten.neg.default, zero))

    assert only_miss(program, LiftChoose).code is MissCode.SHARED


def test_refuses_strides_that_a_view_of_the_scale_depends_on() -> None:
    g = Graph(4, 6)
    turned = g.call(aten.permute.default, g.x, [1, 0])
    scale, _ = g.choose(turned, (1, 2))
    program = g.done(g.call(aten.view.default, scale, [12]))

    assert only_miss(program, LiftChoose).code is MissCode.SHAPE
