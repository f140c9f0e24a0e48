from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.propagate import Graph, applied, only_miss, priced, spec_of, steps

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.optimize.propagate.lift_quantize import LiftQuantize

aten = torch.ops.aten


def joined(g: Graph, op: Any, axis: int, *sizes: int) -> Any:
    """Join the input with others of its shape, but for the sizes along the axis."""
    shape = list(g.x.meta["val"].shape)
    parts = [g.x]
    for index, size in enumerate(sizes):
        parts.append(
            g.b.arg(f"y{index}", g.x.meta["val"].dtype, *shape[:axis], size, *shape[axis + 1 :])
        )
    return g.call(op, parts, axis)


def quantized(g: Graph, x: Any, *block: int | None) -> Any:
    """A static quantize of a value."""
    spec = spec_of(*block)
    return g.quantize(x, spec, g.params(x, spec))


@pytest.mark.numeric
def test_golden_every_part_is_quantized_with_its_part_of_the_parameters() -> None:
    g = Graph(4, 6)
    program = g.done(quantized(g, joined(g, aten.cat.default, 0, 2, 3), 1, None))

    assert applied(program, LiftQuantize).fired == {"lift-quantize": 1}
    assert steps(program)[:4] == ["quantize[4, 6]", "quantize[2, 6]", "quantize[3, 6]", "cat[9, 6]"]
    scales = [n.args[1].meta["val"].shape for n in program.graph.nodes if n.target is ops.quantize]
    assert [tuple(s) for s in scales] == [(4, 1), (2, 1), (3, 1)]
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[4, 6]
%y0: float32[2, 6]
%y1: float32[3, 6]
const %scale1: float32[9, 1]
const %zero2: int32[9, 1]
const %scale1_1: float32[4, 1]
const %zero2_1: int32[4, 1]
%0 = qfuse.quantize(%x, %scale1_1, %zero2_1, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): int8[4, 6]
const %scale1_2: float32[2, 1]
const %zero2_2: int32[2, 1]
%1 = qfuse.quantize(%y0, %scale1_2, %zero2_2, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): int8[2, 6]
const %scale1_3: float32[3, 1]
const %zero2_3: int32[3, 1]
%2 = qfuse.quantize(%y1, %scale1_3, %zero2_3, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): int8[3, 6]
%3 = aten.cat((%0, %1, %2), 0): int8[9, 6]
%4 = qfuse.dequantize(%3, %scale1, %zero2, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[9, 6]
%5 = aten.neg(%4): float32[9, 6]
return (%5)""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("block", "sizes"),
    [
        ((None, None), (2, 3)),
        ((2, None), (2, 3)),
        ((4, None), (4, 1)),
        ((None, 1), (1,)),
        ((9, 2), (5,)),
    ],
    ids=str,
)
def test_blocks_that_begin_with_parts(
    block: tuple[int | None, ...], sizes: tuple[int, ...]
) -> None:
    g = Graph(4, 6)
    program = g.done(quantized(g, joined(g, aten.cat.default, 0, *sizes), *block))

    assert applied(program, LiftQuantize).fired == {"lift-quantize": 1}


@pytest.mark.numeric
@pytest.mark.parametrize("block", [(None, None, None), (None, 1, None), (1, 2, None)], ids=str)
def test_stacked_tensors(block: tuple[int | None, ...]) -> None:
    g = Graph(4, 6)
    other = g.b.arg("y", torch.float32, 4, 6)
    program = g.done(quantized(g, g.call(aten.stack.default, [g.x, other], 1), *block))

    assert applied(program, LiftQuantize).fired == {"lift-quantize": 1}


@pytest.mark.numeric
def test_a_part_that_is_there_twice_is_quantized_once() -> None:
    g = Graph(4, 6)
    program = g.done(quantized(g, g.call(aten.cat.default, [g.x, g.x], 1), None, None))

    applied(program, LiftQuantize)
    assert steps(program)[:2] == ["quantize[4, 6]", "cat[4, 12]"]


@pytest.mark.numeric
@pytest.mark.parametrize("m", [1, 5])
def test_rows_of_a_dynamic_number(m: int) -> None:
    g = Graph("m", 6)
    program = g.done(quantized(g, g.call(aten.cat.default, [g.x, g.x], 0), None, 1))

    assert applied(program, LiftQuantize, m=m).fired == {"lift-quantize": 1}


def test_refuses_a_block_that_spans_two_parts() -> None:
    g = Graph(4, 6)
    program = g.done(quantized(g, joined(g, aten.cat.default, 0, 4), 3, None))

    miss = only_miss(program, LiftQuantize)
    assert (miss.code, miss.at.name) == (MissCode.GRANULARITY, "cat_default")


def test_refuses_scales_along_an_axis_of_unknown_sizes() -> None:
    g = Graph("m", 6)
    twice = g.call(aten.cat.default, [g.x, g.x], 0)
    program = g.done(g.quantize(twice, spec_of(1, None), g.choose(twice, (1, None))))

    assert only_miss(program, LiftQuantize, m=3).code is MissCode.GRANULARITY


def test_refuses_parts_that_are_promoted() -> None:
    g = Graph(4, 6)
    narrow = g.b.arg("y", torch.bfloat16, 4, 6)
    program = g.done(quantized(g, g.call(aten.cat.default, [g.x, narrow], 0), None, None))

    assert only_miss(program, LiftQuantize).code is MissCode.DTYPE


def test_refuses_the_empty_tensor_that_cat_skips() -> None:
    g = Graph(4, 6)
    empty = g.b.arg("y", torch.float32, 0)
    program = g.done(quantized(g, g.call(aten.cat.default, [g.x, empty], 0), None, None))

    assert only_miss(program, LiftQuantize).code is MissCode.DTYPE


def test_refuses_at_a_loss_where_the_joined_numbers_are_needed() -> None:
    g = Graph(4, 6)
    twice = g.call(aten.cat.default, [g.x, g.x], 0)
    program = g.done(quantized(g, twice, None, None), twice)

    assert only_miss(program, LiftQuantize, context=priced()).code is MissCode.PROFIT
