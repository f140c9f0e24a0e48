from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.propagate import Graph, applied, only_miss, spec_of, steps

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.spec import QuantSpec, ZeroPointDomain
from qfuse.optimize.propagate.sink_dequantize import SinkDequantize

aten = torch.ops.aten


def joined(
    op: Any, axis: int, first: QuantSpec, second: QuantSpec, *, same: bool = False
) -> tuple[Graph, NormalGraph]:
    """Two dequantizes of four rows of six, joined."""
    g = Graph(1)
    left, right = g.stored(4, 6), g.stored(4, 6)
    params = g.params(left, first)
    other = params if same else g.params(right, second)
    parts = [g.dequantize(left, first, params), g.dequantize(right, second, other)]
    return g, g.done(g.call(op, parts, axis))


def spec_after(program: NormalGraph) -> str:
    """The spec of the one dequantize."""
    (made,) = [n for n in program.graph.nodes if n.target is ops.dequantize]
    return str(made.args[3])


@pytest.mark.numeric
def test_golden_scales_per_row_are_joined_like_rows() -> None:
    _, program = joined(aten.cat.default, 0, spec_of(1, None), spec_of(1, None))

    assert applied(program, SinkDequantize).fired == {"sink-dequantize": 1}
    assert steps(program) == ["cat[8, 6]", "dequantize[8, 6]", "neg[8, 6]"]
    assert " 1x* " in spec_after(program)
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[1]
%q1: int8[4, 6]
%q2: int8[4, 6]
%0 = aten.cat((%q1, %q2), 0): int8[8, 6]
const %scale3_1: float32[8, 1]
const %zero4_1: int32[8, 1]
%1 = qfuse.dequantize(%0, %scale3_1, %zero4_1, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[8, 6]
%2 = aten.neg(%1): float32[8, 6]
return (%2)""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("op", [aten.cat.default, aten.stack.default])
def test_equal_parameters_stay_one(op: Any, axis: int) -> None:
    spec = spec_of(None, None)
    _, program = joined(op, axis, spec, spec, same=True)

    assert applied(program, SinkDequantize).fired == {"sink-dequantize": 1}


@pytest.mark.numeric
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("block", [(None, None), (1, None), (2, 3)], ids=str)
def test_a_new_axis_has_a_scale_per_index(axis: int, block: tuple[int | None, ...]) -> None:
    _, program = joined(aten.stack.default, axis, spec_of(*block), spec_of(*block))

    assert applied(program, SinkDequantize).fired == {"sink-dequantize": 1}


@pytest.mark.numeric
def test_ranges_unite() -> None:
    low, high = spec_of(None, None, low=-8, high=7), spec_of(None, None, low=0, high=100)
    _, program = joined(aten.cat.default, 1, low, high, same=True)

    applied(program, SinkDequantize)
    assert "int8[-8,100]" in spec_after(program)


@pytest.mark.numeric
def test_parameters_of_run_time_are_joined_at_run_time() -> None:
    g = Graph(4, 6)
    spec = spec_of(1, None)
    parts = []
    for x in (g.x, g.call(aten.neg.default, g.x)):
        params = g.choose(x, (1, None))
        parts.append(g.dequantize(g.quantize(x, spec, params), spec, params))
    program = g.done(g.call(aten.cat.default, parts, 0))

    assert applied(program, SinkDequantize).fired == {"sink-dequantize": 1}


SPEC = spec_of(None, None)


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        (SPEC, SPEC, MissCode.GRANULARITY),
        (spec_of(2, None), spec_of(2, None), MissCode.GRANULARITY),
        (spec_of(1, None), spec_of(None, 1), MissCode.GRANULARITY),
        (
            replace(SPEC, domain=ZeroPointDomain.FLOAT_OFFSET),
            replace(SPEC, domain=ZeroPointDomain.FLOAT_OFFSET, quant_min=0),
            MissCode.GRANULARITY,
        ),
    ],
    ids=["one-scale-each", "blocks-of-two", "other-blocks", "middles-of-ranges"],
)
def test_refuses_parameters_that_cannot_be_joined(
    first: QuantSpec, second: QuantSpec, code: MissCode
) -> None:
    _, program = joined(aten.cat.default, 0, first, second)

    assert only_miss(program, SinkDequantize).code is code


def test_refuses_a_float_part() -> None:
    g = Graph(4, 6)
    real = g.dequantize(g.stored(4, 6), SPEC, g.params(g.x, SPEC))
    program = g.done(g.call(aten.cat.default, [real, g.x], 0))

    miss = only_miss(program, SinkDequantize)
    assert (miss.code, miss.at) == (MissCode.NOT_QUANTIZED, g.x)


def test_refuses_a_zero_point_beside_none() -> None:
    g = Graph(1)
    spec = spec_of(1, None)
    left, right = g.stored(4, 6), g.stored(4, 6)
    scale, zero = g.params(left, spec)
    parts = [g.dequantize(left, spec, (scale, zero)), g.dequantize(right, spec, (scale, None))]
    program = g.done(g.call(aten.cat.default, parts, 0))

    assert only_miss(program, SinkDequantize).code is MissCode.ZERO_POINT


def test_refuses_a_dequantize_that_something_else_reads() -> None:
    g = Graph(1)
    x = g.dequantize(g.stored(4, 6), SPEC, g.params(g.b.arg("y", torch.float32, 4, 6), SPEC))
    program = g.done(g.call(aten.cat.default, [x, x], 0), x)

    assert only_miss(program, SinkDequantize).code is MissCode.SHARED


@pytest.mark.numeric
def test_a_shared_dequantize_sinks_below_joins_that_are_quantized_again() -> None:
    """As in a dense block, where every layer reads all values before it."""
    g = Graph(1)
    params = g.params(g.b.arg("y", torch.float32, 4, 6), SPEC)
    x, z = (g.dequantize(g.stored(4, 6), SPEC, params) for _ in range(2))
    inner = g.call(aten.cat.default, [x, z], 0)
    outer = g.call(aten.cat.default, [inner, x], 0)
    other = g.params(outer, SPEC)
    program = g.done(g.quantize(outer, SPEC, other), x)

    assert applied(program, SinkDequantize).fired == {"sink-dequantize": 2}
    cats = [n for n in program.graph.nodes if n.target is aten.cat.default]
    assert {n.meta["val"].dtype for n in cats} == {torch.int8}


def test_refuses_a_shared_dequantize_below_which_floats_are_needed() -> None:
    g = Graph(1)
    params = g.params(g.b.arg("y", torch.float32, 4, 6), SPEC)
    x, z = (g.dequantize(g.stored(4, 6), SPEC, params) for _ in range(2))
    inner = g.call(aten.cat.default, [x, z], 0)
    real = g.b.arg("r", torch.float32, 4, 6)
    outer = g.call(aten.cat.default, [inner, real], 0)
    program = g.done(g.quantize(outer, SPEC, g.params(outer, SPEC)), x)

    assert not applied(program, SinkDequantize).modified
