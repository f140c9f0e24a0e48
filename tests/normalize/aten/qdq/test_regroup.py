from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    codes,
    finish,
    golden,
    refusal,
    scales,
)
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.ops import library as ops
from qfuse.normalize.aten.qdq.regroup import RegroupDequantize
from qfuse.testing.build import GraphBuilder

SPEC = "int8[-128,127] {} float32 float32:reciprocal:round-zp int"


def grouped(b: GraphBuilder, block: str, *grid: int, zero: bool = False) -> Node:
    """Add a dequantize of a weight ``[4, 8]`` that is viewed as ``[4, 2, 4]``."""
    q = b.call(aten.view.default, b.const("q", codes(4, 8)), (4, 2, 4))
    z = b.const("z", codes(*grid).to(torch.int32)) if zero else None
    return b.call(ops.dequantize, q, b.const("s", scales(*grid)), z, SPEC.format(block))


def test_golden_groups_of_a_weight() -> None:
    b = GraphBuilder()
    y = b.call(aten.view.default, grouped(b, "1x1x*", 4, 2, 1, zero=True), (4, -1))

    assert_expected_inline(
        golden(finish(b, y), RegroupDequantize()),
        """\
const %q: int8[4, 8]
const %s_joined: float32[4, 2]
const %z_joined: int32[4, 2]
%0 = qfuse.dequantize(%q, %s_joined, %z_joined, 'int8[-128,127] 1x4 float32 float32:reciprocal:round-zp int'): float32[4, 8]
return (%0)
fired: regroup-dequantize 1""",
    )


def test_golden_one_scale_for_all_groups_of_a_row() -> None:
    b = GraphBuilder()
    y = b.call(aten.view.default, grouped(b, "1x*x*", 4, 1, 1), (4, 8))

    assert_expected_inline(
        golden(finish(b, y), RegroupDequantize()),
        """\
const %q: int8[4, 8]
const %s_joined: float32[4, 1]
%0 = qfuse.dequantize(%q, %s_joined, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[4, 8]
return (%0)
fired: regroup-dequantize 1""",
    )


def test_golden_groups_of_an_activation_of_any_size() -> None:
    b = GraphBuilder()
    q = b.arg("q", torch.int8, "m", 2, 4)
    size = b.call(aten.sym_size.int, q, 0)
    scale = b.arg("s", torch.float32, "m", 2, 1)
    real = b.call(ops.dequantize, q, scale, None, SPEC.format("1x1x*"))

    program = finish(b, b.call(aten.view.default, real, (size, 8)))

    assert_expected_inline(
        golden(program, RegroupDequantize()),
        """\
%q: int8[s0, 2, 4]
%0 = aten.sym_size.int(%q, 0): SymInt
%s: float32[s0, 2, 1]
%1 = aten.view(%q, (%0, 8)): int8[s0, 8]
%2 = aten.view(%s, (%0, 2)): float32[s0, 2]
%3 = qfuse.dequantize(%1, %2, None, 'int8[-128,127] 1x4 float32 float32:reciprocal:round-zp int'): float32[s0, 8]
return (%3)
fired: regroup-dequantize 1""",
    )


@pytest.mark.parametrize("shape", [(32,), (8, 4), (4, 4, 2), (2, 2, 8)])
def test_refuses_a_view_that_does_not_join_the_groups(shape: tuple[int, ...]) -> None:
    b = GraphBuilder()
    program = finish(b, b.call(aten.view.default, grouped(b, "1x1x*", 4, 2, 1), shape))

    assert refusal(program, RegroupDequantize())[0] in {MissCode.SHAPE, MissCode.PATTERN}


@pytest.mark.parametrize(("block", "grid"), [("1x*x1", (4, 1, 4)), ("1x1x2", (4, 2, 2))])
def test_refuses_scales_that_are_no_groups(block: str, grid: tuple[int, ...]) -> None:
    b = GraphBuilder()
    program = finish(b, b.call(aten.view.default, grouped(b, block, *grid), (4, 8)))

    assert refusal(program, RegroupDequantize())[0] is MissCode.GRANULARITY


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("block", "grid"),
    [("1x1x*", (4, 2, 1)), ("*x1x4", (1, 2, 1)), ("1x*x*", (4, 1, 1)), ("1x2x4", (4, 1, 1))],
)
@pytest.mark.parametrize("zero", [True, False])
def test_values_are_the_same_bits(block: str, grid: tuple[int, ...], zero: bool) -> None:
    b = GraphBuilder()
    y = b.call(aten.reshape.default, grouped(b, block, *grid, zero=zero), (4, 8))

    result = assert_same_values(finish(b, y), [], RegroupDequantize(), exact=True)

    assert result.fired == {"regroup-dequantize": 1}
