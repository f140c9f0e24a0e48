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
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.ir.ops import library as ops
from qfuse.normalize import normalize
from qfuse.normalize.aten.operands.cast_operand import DequantizeCastOperand
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_channel
from qfuse.testing.run import random_inputs

F32 = torch.float32
KINDS = ("mm", "heads", "transposed", "linear", "conv", "zero", "uint8")


def cast(b: GraphBuilder, name: str, *shape: int | str, **kind: torch.dtype) -> Node:
    """Return 8-bit values that are passed in, and cast."""
    stored = kind.get("stored", torch.int8)
    q = b.arg(name, stored, *shape)
    return b.call(aten._to_copy.default, q, dtype=kind.get("dtype", F32))


def weight(b: GraphBuilder, *shape: int) -> Node:
    """Return a dequantized weight."""
    scale = b.const("s", scales(shape[0], *(1,) * (len(shape) - 1)))
    spec = str(per_channel(len(shape)))
    return b.call(ops.dequantize, b.const("w", codes(*shape)), scale, None, spec)


def source(kind: str, dtype: torch.dtype = F32) -> CapturedGraph:
    """Return a product whose activations are cast, and are scaled behind it."""
    b = GraphBuilder()
    if kind == "linear":
        made = b.call(aten.linear.default, cast(b, "x", "m", 8), weight(b, 5, 8))
    elif kind == "conv":
        x = cast(b, "x", 1, 4, 6, 6)
        made = b.call(aten.conv2d.default, x, weight(b, 8, 4, 3, 3))
    elif kind == "zero":
        x = b.call(aten.sub.Tensor, cast(b, "x", "m", 8), 7)
        made = b.call(aten.linear.default, x, weight(b, 5, 8))
    elif kind == "heads":
        q, k = cast(b, "q", 2, 3, "m", 8, dtype=dtype), cast(b, "k", 2, 3, 5, 8, dtype=dtype)
        made = b.call(aten.matmul.default, q, b.call(aten.transpose.int, k, -2, -1))
    else:
        stored = torch.uint8 if kind == "uint8" else torch.int8
        q = cast(b, "q", 4, 8, stored=stored)
        turned = kind == "transposed"
        k = b.call(aten.t.default, cast(b, "k", 5, 8)) if turned else cast(b, "k", 8, 5)
        made = b.call(aten.mm.default, q, k)
    return finish(b, b.call(aten.mul.Tensor, made, 0.01))


def test_golden_scores_of_two_caches() -> None:
    assert_expected_inline(
        golden(source("heads"), DequantizeCastOperand()),
        """\
%q: int8[2, 3, s0, 8]
%k: int8[2, 3, 5, 8]
const %one_of_rank_4: float32[1, 1, 1, 1]
%0 = qfuse.dequantize(%q, %one_of_rank_4, None, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int'): float32[2, 3, s0, 8]
const %one_of_rank_4: float32[1, 1, 1, 1]
%1 = qfuse.dequantize(%k, %one_of_rank_4, None, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int'): float32[2, 3, 5, 8]
%2 = aten.permute(%1, (0, 1, 3, 2)): float32[2, 3, 8, 5]
%3 = aten.matmul(%0, %2): float32[2, 3, s0, 5]
%4 = aten.mul.Tensor(%3, 0.01): float32[2, 3, s0, 5]
return (%4)
fired: dequantize-cast-operand 2""",
    )


def test_golden_the_activation_of_a_convolution() -> None:
    assert_expected_inline(
        golden(source("conv"), DequantizeCastOperand()),
        """\
%x: int8[1, 4, 6, 6]
const %s: float32[8, 1, 1, 1]
const %w: int8[8, 4, 3, 3]
%0 = qfuse.dequantize(%w, %s, None, 'int8[-128,127] 1x*x*x* float32 float32:reciprocal:round-zp int'): float32[8, 4, 3, 3]
const %one_of_rank_4: float32[1, 1, 1, 1]
%1 = qfuse.dequantize(%x, %one_of_rank_4, None, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int'): float32[1, 4, 6, 6]
%2 = aten.conv2d(%1, %0): float32[1, 8, 4, 4]
%3 = aten.mul.Tensor(%2, 0.01): float32[1, 8, 4, 4]
return (%3)
fired: dequantize-cast-operand 1""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("kind", KINDS)
def test_same_bits(kind: str) -> None:
    program = source(kind)
    result = assert_same_values(
        program, random_inputs(program, m=3), DequantizeCastOperand(), exact=True
    )
    assert result.modified
    assert "aten._to_copy" not in calls(program)


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types(dtype: torch.dtype) -> None:
    program = source("heads", dtype)
    result = assert_same_values(
        program, random_inputs(program, m=3), DequantizeCastOperand(), exact=True
    )
    assert result.modified


def test_normalize_applies_it_when_scales_are_found() -> None:
    done = normalize(source("heads"))
    assert calls(done).count("qfuse.dequantize") == 2


def test_refuses_a_float_operand() -> None:
    b = GraphBuilder()
    x = b.arg("x", F32, 5, 8)
    program = finish(b, b.call(aten.linear.default, x, weight(b, 5, 8)))
    assert refusal(program, DequantizeCastOperand())[0] is MissCode.PATTERN
    b = GraphBuilder()
    k, plain = cast(b, "k", 8, 5), b.arg("plain", F32, 4, 8)
    program = finish(b, b.call(aten.mm.default, plain, k))
    assert refusal(program, DequantizeCastOperand())[0] is MissCode.PATTERN


def test_refuses_a_fraction_as_zero_point() -> None:
    b = GraphBuilder()
    x = b.call(aten.sub.Tensor, cast(b, "x", 3, 8), 0.5)
    program = finish(b, b.call(aten.linear.default, x, weight(b, 5, 8)))
    code, at = refusal(program, DequantizeCastOperand())
    assert (code, at) == (MissCode.ZERO_POINT, "sub_tensor")


def test_refuses_a_cast_to_integers() -> None:
    b = GraphBuilder()
    q = cast(b, "q", 4, 8, dtype=torch.int32)
    k = cast(b, "k", 8, 5, dtype=torch.int32)
    program = finish(b, b.call(aten.mm.default, q, k))
    assert refusal(program, DequantizeCastOperand())[0] is MissCode.PATTERN
