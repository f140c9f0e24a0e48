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
from torch.fx.node import Argument

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.ir.ops import library as ops
from qfuse.normalize.aten.int_matmul.scaled_product import FuseScaledProduct
from qfuse.testing.build import GraphBuilder

K, N = 33, 5
SPEC = "int8[-128,127] {} float32 float32:reciprocal:round-zp int"


class Case:
    """A linear on operands with scales, and the factors of its correction."""

    def __init__(self, *rows: int | str, dtype: torch.dtype = torch.float32) -> None:
        self.b = b = GraphBuilder()
        self.x_scale = b.arg("x_scale", torch.float32, *rows, 1)
        self.zero = b.arg("zero", torch.int8, *rows, 1)
        self.w = b.const("w", codes(N, K))
        one = b.const("one", torch.ones(1, 1))
        spec = SPEC.format("x".join("1" * len(rows)) + "x*")
        x = b.call(ops.dequantize, b.arg("q", torch.int8, *rows, K), self.x_scale, None, spec)
        w = b.call(ops.dequantize, self.w, one, None, SPEC.format("*x*"))
        self.linear = self.y = b.call(aten.linear.default, x, w)
        if dtype is not torch.float32:
            self.y = self.cast(self.y, dtype)

    def cast(self, node: Node, dtype: torch.dtype = torch.float32) -> Node:
        return self.b.call(aten._to_copy.default, node, dtype=dtype)

    def mul(self, *factors: Argument) -> Node:
        first, second, *rest = factors
        product = self.b.call(aten.mul.Tensor, first, second)
        return self.mul(product, *rest) if rest else product

    def sums(self, axis: int = -1) -> Node:
        return self.cast(self.b.call(aten.sum.dim_IntList, self.w, (axis,)))

    def done(self, correction: Argument, *outs: Node, **kwargs: int) -> CapturedGraph:
        return finish(self.b, self.b.call(aten.sub.Tensor, self.y, correction, **kwargs), *outs)


def test_golden_views_and_casts_of_the_factors() -> None:
    c = Case("b", "s", dtype=torch.bfloat16)
    c.y = c.b.call(aten.view.default, c.y, (-1, N))
    zero, scale = (c.b.call(aten.view.default, n, (-1, 1)) for n in (c.zero, c.x_scale))
    correction = c.cast(c.mul(c.mul(c.cast(zero), scale), c.sums()), torch.bfloat16)

    assert_expected_inline(
        golden(c.done(correction), FuseScaledProduct()),
        """\
%x_scale: float32[s0, s1, 1]
%zero: int8[s0, s1, 1]
const %w: int8[5, 33]
const %one: float32[1, 1]
%q: int8[s0, s1, 33]
%0 = qfuse.dequantize(%w, %one, None, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): float32[5, 33]
%1 = qfuse.dequantize(%q, %x_scale, %zero, 'int8[-128,127] 1x1x* float32 float32:reciprocal:round-zp int'): float32[s0, s1, 33]
%2 = aten.linear(%1, %0): float32[s0, s1, 5]
%3 = aten._to_copy(%2, dtype=bfloat16): bfloat16[s0, s1, 5]
%4 = aten.view(%3, (-1, 5)): bfloat16[s1*s0, 5]
return (%4)
fired: fuse-scaled-product 1""",
    )


@pytest.mark.parametrize("missing", ["zero", "scale", "sums"])
def test_refuses_a_correction_that_lacks_a_factor(missing: str) -> None:
    c = Case(4)
    factors = {"zero": c.cast(c.zero), "scale": c.x_scale, "sums": c.sums()}
    del factors[missing]
    program = c.done(c.mul(*factors.values()))

    assert refusal(program, FuseScaledProduct())[0] is MissCode.PATTERN


def test_refuses_a_factor_too_many() -> None:
    c = Case(4)
    program = c.done(c.mul(c.cast(c.zero), c.x_scale, c.x_scale, c.sums()))

    assert refusal(program, FuseScaledProduct()) == (MissCode.PATTERN, "x_scale")


def test_refuses_a_number_as_a_factor() -> None:
    c = Case(4)
    program = c.done(c.mul(c.cast(c.zero), c.x_scale, c.sums(), 2.0))

    assert refusal(program, FuseScaledProduct())[0] is MissCode.PATTERN


def test_refuses_sums_over_the_wrong_axis() -> None:
    c = Case(4)
    c.w = c.b.const("v", codes(K, N))
    program = c.done(c.mul(c.cast(c.zero), c.x_scale, c.sums(0)))

    assert refusal(program, FuseScaledProduct())[0] is MissCode.PATTERN


def test_refuses_the_scale_of_something_else() -> None:
    c = Case(4)
    other = c.b.arg("other", torch.float32, 4, 1)
    program = c.done(c.mul(c.cast(c.zero), other, c.sums()))

    assert refusal(program, FuseScaledProduct()) == (MissCode.PATTERN, "other")


def test_refuses_a_zero_point_that_was_rounded_to_integers_on_the_way() -> None:
    c = Case(4)
    scale = c.cast(c.cast(c.x_scale, torch.int8))
    program = c.done(c.mul(c.cast(c.zero), scale, c.sums()))

    assert refusal(program, FuseScaledProduct())[0] is MissCode.PATTERN


def test_refuses_a_zero_point_of_other_blocks() -> None:
    c = Case(4)
    zero = c.b.const("z", torch.tensor([[3]], dtype=torch.int8))
    program = c.done(c.mul(c.cast(zero), c.x_scale, c.sums()))

    assert refusal(program, FuseScaledProduct()) == (MissCode.SHAPE, "z")


def test_refuses_a_scaled_correction() -> None:
    c = Case(4)
    program = c.done(c.mul(c.cast(c.zero), c.x_scale, c.sums()), alpha=2)

    assert refusal(program, FuseScaledProduct()) == (MissCode.ARGUMENT, "sub_tensor")


def test_refuses_a_result_that_others_read() -> None:
    c = Case(4)
    program = c.done(c.mul(c.cast(c.zero), c.x_scale, c.sums()), c.linear)

    assert refusal(program, FuseScaledProduct()) == (MissCode.SHARED, "linear_default")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("what", ["result", "zero", "scale", "sums", "correction"])
def test_refuses_what_is_stored_as_float8_for_a_while(what: str, dtype: torch.dtype) -> None:
    c = Case(4)

    def stored(node: Node, name: str) -> Node:
        return c.cast(c.cast(node, dtype)) if name == what else node

    c.y = stored(c.y, "result")
    zero, scale = stored(c.cast(c.zero), "zero"), stored(c.x_scale, "scale")
    program = c.done(stored(c.mul(zero, scale, stored(c.sums(), "sums")), "correction"))

    assert refusal(program, FuseScaledProduct())[0] is MissCode.PATTERN


def test_refuses_a_zero_point_that_is_rounded() -> None:
    c = Case(4)
    zero = c.cast(c.b.arg("wide", torch.int32, 4, 1), torch.bfloat16)
    program = c.done(c.mul(c.cast(zero), c.x_scale, c.sums()))

    assert refusal(program, FuseScaledProduct())[0] is MissCode.PATTERN


@pytest.mark.numeric
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m", [1, 6])
def test_values_agree(order: tuple[int, ...], dtype: torch.dtype, m: int) -> None:
    c = Case(2, m, dtype=dtype)
    factors = (c.cast(c.zero), c.x_scale, c.sums())
    correction = c.mul(*(factors[i] for i in order))
    if dtype is not torch.float32:
        correction = c.cast(correction, dtype)
    program = c.done(correction)

    inputs = [scales(2, m, 1), codes(2, m, 1), codes(2, m, K)]
    result = assert_same_values(program, inputs, FuseScaledProduct())

    assert result.fired == {"fuse-scaled-product": 1}
