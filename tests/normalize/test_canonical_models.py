"""Models written in canonical ops: what normalize rewrites keeps both levels of scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.sources.dialects import Source, assert_same_bits, ops_of
from torch.fx import Node

from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import as_dequantize, as_quantize
from qfuse.ir.quant.element import CONTAINER
from qfuse.ir.quant.spec import QuantSpec
from qfuse.normalize.builtin import BUILTIN

pytestmark = pytest.mark.numeric

aten = torch.ops.aten
TWO = "float4_e2m1[-6,6] 1x16 float32 float32:reciprocal:round-zp none e4m3 outer=1x*"
ONE = "float4_e2m1[-6,6] 1x32 float32 float32:divide:round-zp none e8m0"


def params(s: Source, text: str, *shape: int) -> tuple[Any, ...]:
    """Constants and the text of a spec, as arguments."""
    spec = QuantSpec.parse(text)
    grid = [int(n) for n in spec.grid(shape)]
    if spec.outer is None:
        powers = torch.randint(120, 130, grid).to(torch.uint8).view(torch.float8_e8m0fnu)
        return s.either(powers, constant=True), None, text
    scale = s.either((torch.rand(grid) + 0.1).to(torch.float8_e4m3fn), constant=True)
    return scale, None, text, s.either(torch.rand(shape[0], 1) + 0.1, constant=True)


def weight(s: Source, text: str, *shape: int) -> Node:
    """A dequantized weight."""
    q = torch.randint(-3, 4, shape).float().to(CONTAINER)
    return s.b.call(ops.dequantize, s.either(q, constant=True), *params(s, text, *shape))


@pytest.mark.parametrize("text", [TWO, ONE])
def test_a_cast_folds_into_either_side(text: str) -> None:
    s = Source()
    args = params(s, text, 4, 64)
    x = s.b.call(aten._to_copy.default, s.arg(torch.randn(4, 64).bfloat16()), dtype=torch.float32)
    q = s.b.call(ops.quantize, x, *args)
    y = s.b.call(ops.dequantize, q, *args)
    y = s.b.call(aten._to_copy.default, y, dtype=torch.bfloat16)
    program = assert_same_bits(s, s.b.call(aten.neg.default, y), dialects=BUILTIN)

    assert ops_of(program) == ["quantize", "dequantize"]
    for node in program.graph.nodes:
        for view in (as_quantize(node), as_dequantize(node)):
            if view is not None:
                assert view.params.spec.float_dtype is torch.bfloat16
                assert (view.params.outer_scale is None) == (text == ONE)


@pytest.mark.parametrize("text", [TWO, ONE])
def test_a_weight_is_transposed_with_its_scales(text: str) -> None:
    s = Source()
    turned = weight(s, text, 64, 48 + 16)
    program = assert_same_bits(
        s, s.b.call(aten.mm.default, s.arg(torch.randn(3, 64)), turned), dialects=BUILTIN
    )
    assert "dequantize" in ops_of(program)


def test_operands_are_folded_and_the_second_level_stays() -> None:
    s = Source()
    scale, _, text, outer = params(s, TWO, 4, 64)
    q = s.either(torch.randint(-3, 4, (64, 4)).float().to(CONTAINER), constant=True)
    y = s.b.call(ops.dequantize, s.b.call(aten.t.default, q), scale, None, text, outer)
    program = assert_same_bits(s, s.b.call(aten.neg.default, y), dialects=BUILTIN)
    (real,) = [v for n in program.graph.nodes if (v := as_dequantize(n)) is not None]
    assert real.q.op == "get_attr"
    assert real.params.outer_scale is not None


def test_groups_of_two_levels_are_not_regrouped() -> None:
    s = Source()
    text = "float4_e2m1[-6,6] 1x1x* float32 float32:reciprocal:round-zp none e4m3 outer=1x*x*"
    scale = s.either((torch.rand(4, 2, 1) + 0.1).to(torch.float8_e4m3fn), constant=True)
    outer = s.either(torch.rand(4, 1, 1), constant=True)
    q = s.either(torch.randint(-3, 4, (4, 2, 16)).float().to(CONTAINER), constant=True)
    y = s.b.call(ops.dequantize, q, scale, None, text, outer)
    assert_same_bits(
        s, s.b.call(aten.neg.default, s.b.call(aten.view.default, y, [4, 32])), dialects=BUILTIN
    )


def test_a_product_of_stored_elements_and_a_float() -> None:
    s = Source()
    q = s.b.call(ops.quantize, s.arg(torch.randn(4, 64)), *params(s, ONE, 4, 64))
    real = s.b.call(aten._to_copy.default, q, dtype=torch.float32)
    by = s.either(torch.rand(4, 1), constant=True)
    assert_same_bits(s, s.b.call(aten.mul.Tensor, real, by), dialects=BUILTIN)


def test_a_scale_of_one_in_a_format_of_its_own_is_kept() -> None:
    s = Source()
    text = "float4_e2m1[-6,6] *x* float32 float32:divide:round-zp none e8m0"
    one = s.either(torch.ones(1, 1).to(torch.float8_e8m0fnu), constant=True)
    q = s.either(torch.randint(-3, 4, (8, 64)).float().to(CONTAINER), constant=True)
    w = s.b.call(ops.dequantize, q, one, None, text)
    y = s.b.call(aten.linear.default, s.arg(torch.randn(3, 64)), w)
    by = s.either(torch.rand(8), constant=True)
    assert_same_bits(s, s.b.call(aten.mul.Tensor, y, by), dialects=BUILTIN)
