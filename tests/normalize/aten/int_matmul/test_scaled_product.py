"""Whole expressions behind a product: factors, corrections, casts and views, in one rewrite."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    calls,
    codes,
    finish,
    golden,
    refusal,
    scales,
)
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.normalize.aten.int_matmul.scaled_product import FuseScaledProduct
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rule import Miss
from qfuse.testing.build import GraphBuilder

K, N = 33, 5


class Case:
    """``x [2, m, K]`` times a weight, in integers, and the parts of what may follow."""

    def __init__(self, m: int | str = 3, *, columns: bool = False) -> None:
        self.b = b = GraphBuilder()
        self.q = b.arg("q", torch.int8, 2, m, K)
        self.x_scale = b.arg("x_scale", torch.float32, 2, m, 1)
        self.zero = b.arg("zero", torch.int8, 2, m, 1)
        self.w = b.const("w", codes(K, N) if columns else codes(N, K))
        self.s = b.const("s", scales(N))
        self.columns = columns

    def view(self, node: Node, last: int) -> Node:
        return self.b.call(aten.view.default, node, (-1, last))

    def cast(self, node: Node, dtype: torch.dtype = torch.float32) -> Node:
        return self.b.call(aten._to_copy.default, node, dtype=dtype)

    def product(self, x: Node | None = None) -> Node:
        """Add ``_int_mm`` of ``x``, or of the rows of ``q``."""
        w = self.w if self.columns else self.b.call(aten.t.default, self.w)
        return self.b.call(aten._int_mm.default, x or self.view(self.q, K), w)

    def sums(self, *, keepdim: bool = False) -> Node:
        axis = 0 if self.columns else 1
        dtype = torch.int32
        return self.b.call(aten.sum.dim_IntList, self.w, (axis,), keepdim, dtype=dtype)

    def mul(self, one: Node, *others: Node | float) -> Node:
        for other in others:
            one = self.b.call(aten.mul.Tensor, one, other)
        return one

    def sub(self, one: Node, other: Node) -> Node:
        return self.b.call(aten.sub.Tensor, one, other)


def test_golden_integers_with_both_scales_and_a_correction_of_floats() -> None:
    c = Case("m")
    row = c.view(c.x_scale, 1)
    y = c.cast(c.mul(c.product(), row), torch.bfloat16)
    y = c.sub(y, c.mul(c.cast(c.view(c.zero, 1)), row, c.cast(c.sums())))
    y = c.mul(c.s, c.b.call(aten.view.default, y, (2, -1, N)))

    assert_expected_inline(
        golden(finish(c.b, y), FuseScaledProduct()),
        """\
%q: int8[2, s0, 33]
%x_scale: float32[2, s0, 1]
%zero: int8[2, s0, 1]
const %w: int8[5, 33]
%0 = qfuse.dequantize(%q, %x_scale, %zero, 'int8[-128,127] 1x1x* float32 float32:reciprocal:round-zp int'): float32[2, s0, 33]
const %s_scale: float32[5, 1]
%1 = qfuse.dequantize(%w, %s_scale, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[5, 33]
%2 = aten.linear(%0, %1): float32[2, s0, 5]
%3 = aten.view(%2, (-1, 5)): float32[2*s0, 5]
%4 = aten.view(%3, (2, -1, 5)): float32[2, s0, 5]
return (%4)
fired: fuse-scaled-product 1""",
    )


def test_golden_a_correction_of_integers_before_the_scales() -> None:
    c = Case("m", columns=True)
    y = c.sub(c.product(), c.mul(c.sums(keepdim=True), 3))
    y = c.mul(c.s, c.mul(c.cast(y), c.view(c.x_scale, 1)))

    assert_expected_inline(
        golden(finish(c.b, y), FuseScaledProduct()),
        """\
%q: int8[2, s0, 33]
%x_scale: float32[2, s0, 1]
%zero: int8[2, s0, 1]
%0 = aten.full_like(%x_scale, 3, dtype=int32): int32[2, s0, 1]
%1 = qfuse.dequantize(%q, %x_scale, %0, 'int8[-128,127] 1x1x* float32 float32:reciprocal:round-zp int'): float32[2, s0, 33]
const %w_t: int8[5, 33]
const %s_scale: float32[5, 1]
%2 = qfuse.dequantize(%w_t, %s_scale, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[5, 33]
%3 = aten.linear(%1, %2): float32[2, s0, 5]
%4 = aten.view(%3, (-1, 5)): float32[2*s0, 5]
return (%4)
fired: fuse-scaled-product 1""",
    )


def test_golden_what_follows_a_factor_that_is_refused_stays() -> None:
    c = Case()
    y = c.mul(c.product(), c.view(c.x_scale, 1), c.b.arg("gate", torch.float32, 6, N), c.s)

    assert_expected_inline(
        golden(finish(c.b, y), FuseScaledProduct()),
        """\
%q: int8[2, 3, 33]
%x_scale: float32[2, 3, 1]
%zero: int8[2, 3, 1]
const %w: int8[5, 33]
const %s: float32[5]
%gate: float32[6, 5]
%0 = qfuse.dequantize(%q, %x_scale, None, 'int8[-128,127] 1x1x* float32 float32:reciprocal:round-zp int'): float32[2, 3, 33]
const %one_of_rank_2: float32[1, 1]
%1 = qfuse.dequantize(%w, %one_of_rank_2, None, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): float32[5, 33]
%2 = aten.linear(%0, %1): float32[2, 3, 5]
%3 = aten.view(%2, (-1, 5)): float32[6, 5]
%4 = aten.mul.Tensor(%3, %gate): float32[6, 5]
%5 = aten.mul.Tensor(%4, %s): float32[6, 5]
return (%5)
fired: fuse-scaled-product 1""",
    )


def test_refuses_a_third_factor() -> None:
    c = Case()
    program = finish(c.b, c.mul(c.product(), c.view(c.x_scale, 1), c.s, c.s))
    result = assert_same_values(
        program, [codes(2, 3, K), scales(2, 3, 1), codes(2, 3, 1)], FuseScaledProduct()
    )

    assert result.fired == {"fuse-scaled-product": 1}
    assert calls(program).count("aten.mul.Tensor") == 1
    assert refusal(program, FuseScaledProduct())[0] is MissCode.PATTERN


def test_refuses_integers_that_are_only_shifted() -> None:
    c = Case()
    y = c.sub(c.product(), c.mul(c.sums(), 3))
    finish(c.b, y)

    miss = FuseScaledProduct().match(y)

    assert isinstance(miss, Miss)
    assert (miss.code, miss.progress) == (MissCode.PATTERN, 0)


@pytest.mark.parametrize("x", [torch.float32, torch.int8])
def test_refuses_to_take_what_is_subtracted_from_casts_as_a_correction(x: torch.dtype) -> None:
    b = GraphBuilder()
    q, w = b.arg("q", x, 4, K), b.const("w", codes(N, K))
    s = b.arg("x_scale", torch.float32, 4, 1) if x is torch.int8 else b.const("s", scales(N))
    wide = b.call(aten._to_copy.default, w, dtype=torch.float32)
    if x is torch.int8:
        q = b.call(aten._to_copy.default, q, dtype=torch.float32)
    y = b.call(aten.mul.Tensor, b.call(aten.linear.default, q, wide), s)
    sums = b.call(aten.sum.dim_IntList, w, (1,), dtype=torch.float32)
    y = b.call(aten.sub.Tensor, y, b.call(aten.mul.Tensor, sums, 3.0))
    program = finish(b, y)

    assert apply_rules(program, [FuseScaledProduct()]).fired == {"fuse-scaled-product": 1}
    assert calls(program).count("aten.sub.Tensor") == 1
    assert refusal(program, FuseScaledProduct())[0] is MissCode.PATTERN


def test_a_result_with_other_users_on_the_way_is_read_up_to_there() -> None:
    c = Case()
    half = c.mul(c.product(), c.view(c.x_scale, 1))
    program = finish(c.b, c.mul(half, c.s), half)
    result = assert_same_values(
        program, [codes(2, 3, K), scales(2, 3, 1), codes(2, 3, 1)], FuseScaledProduct()
    )

    assert result.fired == {"fuse-scaled-product": 1}
    assert calls(program).count("aten.mul.Tensor") == 1
    assert refusal(program, FuseScaledProduct())[0] is MissCode.SHARED


@pytest.mark.numeric
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("order", ["row", "weight", "both"])
@pytest.mark.parametrize("m", [1, 4])
def test_a_correction_with_both_scales_agrees(columns: bool, order: str, m: int) -> None:
    c = Case(m, columns=columns)
    row, y = c.view(c.x_scale, 1), c.cast(c.product())
    match order:
        case "row":
            y = c.mul(y, row, c.s)
        case "weight":
            y = c.mul(y, c.s, row)
        case _:
            y = c.mul(y, c.mul(row, c.s))
    correction = c.mul(c.cast(c.view(c.zero, 1)), row, c.cast(c.sums()), c.s)
    program = finish(c.b, c.sub(y, correction))

    inputs = [codes(2, m, K), scales(2, m, 1), codes(2, m, 1)]
    result = assert_same_values(program, inputs, FuseScaledProduct())

    assert result.fired == {"fuse-scaled-product": 1}
    assert calls(program).count("aten.linear") == 1
    assert not {"aten.mul.Tensor", "aten.sub.Tensor", "aten._int_mm"} & set(calls(program))


@pytest.mark.numeric
@pytest.mark.parametrize("m", [1, 4])
def test_unsigned_numbers_that_are_shifted_back_and_scaled_agree(m: int) -> None:
    c = Case(m)
    wide = c.b.call(aten.add.Tensor, c.cast(c.view(c.q, K), torch.int32), 128)
    y = c.sub(c.product(c.cast(wide, torch.uint8)), c.mul(c.sums(), 128))
    program = finish(c.b, c.mul(c.cast(y), c.s, c.view(c.x_scale, 1)))

    inputs = [codes(2, m, K), scales(2, m, 1), codes(2, m, 1)]
    result = assert_same_values(program, inputs, FuseScaledProduct())

    assert result.fired == {"fuse-scaled-product": 1}
    assert set(calls(program)) <= {"qfuse.dequantize", "aten.linear", "aten.view"}
