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
)
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.normalize.aten.int_matmul.layers import FuseIntLayer
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import random_inputs


def source(
    *,
    kind: str = "conv",
    wide: torch.dtype = torch.int32,
    stored: torch.dtype = torch.int8,
    zero: int = 0,
    k: int = 4,
    bias: bool = False,
) -> CapturedGraph:
    """Return a layer of 8-bit values that are cast to integers."""
    b = GraphBuilder()

    def cast(value: Node) -> Node:
        made = b.call(aten._to_copy.default, value, dtype=wide)
        return b.call(aten.sub.Tensor, made, zero) if zero else made

    image = kind != "linear"
    shape: tuple[int, ...] = (8, 1 if kind == "depthwise" else k, 3, 3) if image else (8, k)
    x = cast(b.arg("x", stored, *((2, 8 if kind == "depthwise" else k, 6, 6) if image else (3, k))))
    w = cast(b.const("w", codes(*shape)))
    args = [x, w, b.const("b", torch.arange(8).to(wide)) if bias else None]
    if not image:
        return finish(b, b.call(aten.linear.default, *args))
    groups = 8 if kind == "depthwise" else 1
    return finish(b, b.call(aten.conv2d.default, *args, [1, 1], [1, 1], [1, 1], groups))


def test_golden_a_convolution_of_integers() -> None:
    assert_expected_inline(
        golden(source(), FuseIntLayer()),
        """\
%x: int8[2, 4, 6, 6]
const %w: int8[8, 4, 3, 3]
const %one_of_rank_4: float32[1, 1, 1, 1]
%0 = qfuse.dequantize(%x, %one_of_rank_4, None, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int'): float32[2, 4, 6, 6]
const %one_of_rank_4: float32[1, 1, 1, 1]
%1 = qfuse.dequantize(%w, %one_of_rank_4, None, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int'): float32[8, 4, 3, 3]
%2 = aten.conv2d(%0, %1, None, (1, 1), (1, 1), (1, 1), 1): float32[2, 8, 6, 6]
%3 = aten._to_copy(%2, dtype=int32): int32[2, 8, 6, 6]
return (%3)
fired: fuse-int-layer 1""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("kind", ["conv", "depthwise", "linear"])
@pytest.mark.parametrize(
    ("wide", "stored", "zero"),
    [
        (torch.int32, torch.int8, 0),
        (torch.int64, torch.int8, 5),
        (torch.int32, torch.uint8, 0),
    ],
    ids=str,
)
def test_same_integers(kind: str, wide: torch.dtype, stored: torch.dtype, zero: int) -> None:
    program = source(kind=kind, wide=wide, stored=stored, zero=zero)
    fired = assert_same_values(program, random_inputs(program), FuseIntLayer(), exact=True).fired
    assert fired == {"fuse-int-layer": 1}


@pytest.mark.numeric
def test_largest_sums_are_exact() -> None:
    program = source(kind="linear", k=1024)
    x = torch.full((3, 1024), -128, dtype=torch.int8)
    x[1:, ::3] = 77
    fired = assert_same_values(program, [x], FuseIntLayer(), exact=True).fired
    assert fired == {"fuse-int-layer": 1}


@pytest.mark.numeric
def test_views_behind_the_cast() -> None:
    b = GraphBuilder()
    x = b.call(aten._to_copy.default, b.arg("x", torch.int8, 2, 4, 8), dtype=torch.int32)
    w = b.call(aten._to_copy.default, b.const("w", codes(5, 8)), dtype=torch.int32)
    y = b.call(aten.linear.default, b.call(aten.view.default, x, [8, 8]), w)
    program = finish(b, y)
    fired = assert_same_values(program, random_inputs(program), FuseIntLayer(), exact=True).fired
    assert fired == {"fuse-int-layer": 1}


def test_refuses_sums_that_float32_rounds() -> None:
    assert refusal(source(kind="linear", k=1025), FuseIntLayer())[0] is MissCode.RANGE
    assert refusal(source(k=114), FuseIntLayer())[0] is MissCode.RANGE


def test_refuses_a_bias_and_products_that_wrap() -> None:
    assert refusal(source(bias=True), FuseIntLayer())[0] is MissCode.ARGUMENT
    assert refusal(source(wide=torch.int16), FuseIntLayer())[0] is MissCode.PATTERN


def test_refuses_a_weight_that_is_passed_in() -> None:
    b = GraphBuilder()
    x, w = (
        b.call(aten._to_copy.default, b.arg(name, torch.int8, 4, 8), dtype=torch.int32)
        for name in ("x", "w")
    )
    program = finish(b, b.call(aten.linear.default, x, w))
    assert refusal(program, FuseIntLayer())[0] is MissCode.NOT_CONSTANT


def test_refuses_values_of_more_bits() -> None:
    b = GraphBuilder()
    x = b.call(aten._to_copy.default, b.arg("x", torch.int16, 4, 8), dtype=torch.int32)
    w = b.call(aten._to_copy.default, b.const("w", codes(5, 8)), dtype=torch.int32)
    program = finish(b, b.call(aten.linear.default, x, w))
    assert refusal(program, FuseIntLayer())[0] is MissCode.DTYPE
