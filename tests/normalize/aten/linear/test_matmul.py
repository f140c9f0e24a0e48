from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    finish,
    golden,
    refusal,
    scales,
    whole,
)

from qfuse.ir.events import MissCode
from qfuse.normalize.aten.linear.spellings import LINEAR_FROM
from qfuse.testing.build import GraphBuilder


def test_golden_an_activation_of_any_rank() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, "m", 8)
    y = b.call(aten.matmul.default, x, b.const("w", torch.randn(8, 4)))

    assert_expected_inline(
        golden(finish(b, y), LINEAR_FROM["matmul"]()),
        """\
%x: float32[2, s0, 8]
const %w_t: float32[4, 8]
%0 = aten.linear(%x, %w_t): float32[2, s0, 4]
return (%0)
fired: linear-from-matmul 1""",
    )


def test_golden_a_weight_that_is_dequantized_transposed() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.bfloat16, 2, 3, 8)
    q = b.call(aten.t.default, b.const("q", whole(4, 8, dtype=torch.int8)))
    scale = b.call(aten.t.default, b.const("scale", scales(4, 1)))
    spec = "int8[-128,127] *x1 float32 float32:reciprocal:round-zp int"
    real = b.call(torch.ops.qfuse.dequantize.default, q, scale, None, spec)
    w = b.call(aten._to_copy.default, real, dtype=torch.bfloat16)
    y = b.call(aten.matmul.default, x, w)

    assert_expected_inline(
        golden(finish(b, y), LINEAR_FROM["matmul"]()),
        """\
%x: bfloat16[2, 3, 8]
const %q: int8[4, 8]
const %scale: float32[4, 1]
%0 = qfuse.dequantize(%q, %scale, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[4, 8]
%1 = aten._to_copy(%0, dtype=bfloat16): bfloat16[4, 8]
%2 = aten.linear(%x, %1): bfloat16[2, 3, 4]
return (%2)
fired: linear-from-matmul 1""",
    )


def test_golden_a_weight_times_a_vector() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 8)
    y = b.call(aten.matmul.default, b.const("w", torch.randn(4, 8)), x)

    assert_expected_inline(
        golden(finish(b, y), LINEAR_FROM["matmul"]()),
        """\
%x: float32[8]
const %w: float32[4, 8]
%0 = aten.linear(%x, %w): float32[4]
return (%0)
fired: linear-from-matmul 1""",
    )


def test_refuses_two_activations() -> None:
    b = GraphBuilder()
    x, y = b.arg("x", torch.float32, 2, 3, 8), b.arg("y", torch.float32, 8, 4)
    program = finish(b, b.call(aten.matmul.default, x, y))

    assert refusal(program, LINEAR_FROM["matmul"]()) == (MissCode.NOT_CONSTANT, "y")


def test_refuses_a_matrix_per_batch_entry() -> None:
    b = GraphBuilder()
    x, w = b.arg("x", torch.float32, 2, 3, 8), b.const("w", torch.randn(2, 8, 4))
    program = finish(b, b.call(aten.matmul.default, x, w))

    assert refusal(program, LINEAR_FROM["matmul"]()) == (MissCode.SHAPE, "w")


def test_refuses_a_weight_on_the_left_of_a_matrix() -> None:
    b = GraphBuilder()
    x, w = b.arg("x", torch.float32, 8, 3), b.const("w", torch.randn(4, 8))
    program = finish(b, b.call(aten.matmul.default, w, x))

    assert refusal(program, LINEAR_FROM["matmul"]()) == (MissCode.NOT_CONSTANT, "x")


@pytest.mark.numeric
@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8), (2, 1, 3, 8), (0, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_the_same_bits(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    b = GraphBuilder()
    x = b.arg("x", dtype, *shape)
    y = b.call(aten.matmul.default, x, b.const("w", torch.randn(8, 5).to(dtype)))
    outs = [y]
    if len(shape) == 1:
        outs.append(b.call(aten.matmul.default, b.const("v", torch.randn(5, 8).to(dtype)), x))

    inputs = [torch.randn(shape).to(dtype)]
    result = assert_same_values(finish(b, *outs), inputs, LINEAR_FROM["matmul"](), exact=True)

    assert result.fired == {"linear-from-matmul": len(outs)}


@pytest.mark.numeric
def test_a_transposed_activation_is_multiplied_row_by_row() -> None:
    b = GraphBuilder()
    x = b.call(aten.transpose.int, b.arg("x", torch.float32, 3, 2, 33), 0, 1)
    y = b.call(aten.matmul.default, x, b.const("w", whole(33, 5)))

    assert_same_values(finish(b, y), [whole(3, 2, 33)], LINEAR_FROM["matmul"](), exact=True)
