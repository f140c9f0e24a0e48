from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.propagate import Graph, applied, only_miss, spec_of, steps

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.optimize.propagate.sink_dequantize import SinkDequantize

aten = torch.ops.aten


def split(g: Graph, *block: int | None, sizes: Any = 4) -> tuple[Any, Any]:
    """A dequantize of twelve columns, and its split into columns."""
    spec = spec_of(*block)
    q = g.stored(6, 12)
    x = g.dequantize(q, spec, g.params(q, spec))
    op = aten.split.Tensor if isinstance(sizes, int) else aten.split_with_sizes.default
    return x, g.call(op, x, sizes, 1)


@pytest.mark.numeric
def test_golden_stored_numbers_are_split() -> None:
    g = Graph(1)
    _, parts = split(g, None, None)
    program = g.done(g.b.item(parts, 0), g.b.item(parts, 2))

    assert applied(program, SinkDequantize).fired == {"sink-dequantize": 1}
    assert sorted(steps(program)) == sorted(["getitem[6, 4]", "dequantize[6, 4]", "neg[6, 4]"] * 2)
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[1]
%q1: int8[6, 12]
const %scale2: float32[1, 1]
const %zero3: int32[1, 1]
%0 = aten.split.Tensor(%q1, 4, 1): (int8[6, 4], int8[6, 4], int8[6, 4])
%1 = getitem(%0, 0): int8[6, 4]
%2 = qfuse.dequantize(%1, %scale2, %zero3, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): float32[6, 4]
%3 = getitem(%0, 2): int8[6, 4]
%4 = qfuse.dequantize(%3, %scale2, %zero3, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): float32[6, 4]
%5 = aten.neg(%2): float32[6, 4]
%6 = aten.neg(%4): float32[6, 4]
return (%5, %6)""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("block", [(None, None), (1, None), (None, 1), (2, 4), (1, 2)], ids=str)
@pytest.mark.parametrize("sizes", [4, [4, 8]], ids=str)
def test_every_part_takes_its_parameters(block: tuple[int | None, ...], sizes: Any) -> None:
    g = Graph(1)
    _, parts = split(g, *block, sizes=sizes)
    program = g.done(*(g.b.item(parts, i) for i in range(len(parts.meta["val"]))))

    assert applied(program, SinkDequantize).fired == {"sink-dequantize": 1}


@pytest.mark.numeric
def test_a_dynamic_scale_is_there_already() -> None:
    g = Graph(6, 12)
    spec = spec_of(None, None)
    params = g.choose(g.x, (None, None))
    x = g.dequantize(g.quantize(g.x, spec, params), spec, params)
    program = g.done(g.b.item(g.call(aten.split.Tensor, x, 5, 1), 1))

    assert applied(program, SinkDequantize).fired == {"sink-dequantize": 1}


def test_refuses_a_block_that_is_cut() -> None:
    g = Graph(1)
    _, parts = split(g, None, 3)
    program = g.done(g.b.item(parts, 1), g.b.item(parts, 2))

    assert only_miss(program, SinkDequantize).code is MissCode.GRANULARITY


def test_refuses_a_dequantize_that_something_else_reads() -> None:
    g = Graph(1)
    x, parts = split(g, None, None)
    program = g.done(g.b.item(parts, 1), x)

    miss = only_miss(program, SinkDequantize)
    assert (miss.code, miss.at) == (MissCode.SHARED, x)


def test_refuses_strides_that_the_caller_would_see() -> None:
    g = Graph(1)
    _, parts = split(g, None, None)
    program = g.b.done(g.b.item(parts, 1))

    assert only_miss(program, SinkDequantize).code is MissCode.SHAPE
