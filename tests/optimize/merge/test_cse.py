from __future__ import annotations

from collections import Counter

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.epilogue import calls
from tests.support.values import bits_same
from torch.fx import Node

from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.optimize.merge.cse import Combine
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import PassResult, RewriteContext
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import QuantizedLinear, per_tensor, per_token
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten


def combine(program: NormalGraph, **sizes: int) -> PassResult:
    """Combine; values must stay the same bits."""
    source = clone(program)
    result = Combine().run(program, RewriteContext("optimize"))
    inputs = random_inputs(program, **sizes)
    assert bits_same(run(program, inputs), run(source, inputs))
    return result


@pytest.mark.numeric
def test_golden_siblings_share_one_dynamic_quantize() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "m", 8)
    spec = per_token(2)
    choose = ChooseSpec(Formula.AO_SYMMETRIC, torch.int8, -128, 127, spec.block, 1e-7)
    outs = []
    for index in range(3):
        pair = b.call(ops.choose_qparams, x, str(choose))
        scale = b.item(pair, 0)
        q = b.call(ops.quantize, x, scale, None, str(spec))
        real = b.call(ops.dequantize, q, scale, None, str(spec))
        outs.append(QuantizedLinear(b, 4, 8).linear(real, f"w{index}"))
    program = b.done(*outs)

    combine(program, m=6)
    assert calls(program).count("qfuse.choose_qparams") == 1
    assert calls(program).count("qfuse.quantize") == 1
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, 8]
%0 = qfuse.choose_qparams(%x, 'ao-symmetric int8[-128,127] 1x* eps=1e-07 float32 int32'): (float32[s0, 1], int32[s0, 1])
%1 = getitem(%0, 0): float32[s0, 1]
%2 = qfuse.quantize(%x, %1, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): int8[s0, 8]
%3 = qfuse.dequantize(%2, %1, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[s0, 8]
const %w0: int8[4, 8]
const %w0_scale: float32[4, 1]
%4 = qfuse.dequantize(%w0, %w0_scale, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[4, 8]
const %w0_bias: float32[4]
%5 = aten.linear(%3, %4, %w0_bias): float32[s0, 4]
const %w1: int8[4, 8]
const %w1_scale: float32[4, 1]
%6 = qfuse.dequantize(%w1, %w1_scale, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[4, 8]
const %w1_bias: float32[4]
%7 = aten.linear(%3, %6, %w1_bias): float32[s0, 4]
const %w2: int8[4, 8]
const %w2_scale: float32[4, 1]
%8 = qfuse.dequantize(%w2, %w2_scale, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[4, 8]
const %w2_bias: float32[4]
%9 = aten.linear(%3, %8, %w2_bias): float32[s0, 4]
return (%5, %7, %9)""",
    )


def test_golden_constants_with_equal_bits_are_one_parameter() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3, 8)
    block = QuantizedLinear(b, 4, 8)
    scale = torch.tensor([[0.0123]])
    spec = str(per_tensor(2))
    q1 = b.call(ops.quantize, x, b.const("scale1", scale), None, spec)
    q2 = b.call(ops.quantize, x, b.const("scale2", scale.clone()), None, spec)
    program = b.done(b.call(aten.neg.default, q1), b.call(aten.neg.default, q2))
    del block

    assert combine(program).fired == {"combine": 1}
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[3, 8]
const %scale1: float32[1, 1]
%0 = qfuse.quantize(%x, %scale1, None, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): int8[3, 8]
%1 = aten.neg(%0): int8[3, 8]
%2 = aten.neg(%0): int8[3, 8]
return (%1, %2)""",
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.tensor([[0.0123]]), torch.tensor([[0.0123]], dtype=torch.float64)),
        (torch.tensor([[0.0123]]), torch.tensor([[0.0123]]) * (1 + 1e-7)),
        (torch.tensor([[0.0]]), torch.tensor([[-0.0]])),
    ],
    ids=["another-dtype", "one-ulp", "signed-zero"],
)
def test_refuses_parameters_that_only_look_equal(first: torch.Tensor, second: torch.Tensor) -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3, 8)
    spec = str(per_tensor(2))
    q1 = b.call(ops.quantize, x, b.const("s1", first), None, spec)
    q2 = b.call(ops.quantize, x, b.const("s2", second), None, spec)
    program = b.done(b.call(aten.neg.default, q1), b.call(aten.neg.default, q2))

    assert not Combine().run(program, RewriteContext("optimize")).modified


def test_refuses_quantizes_with_other_ranges() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3, 8)
    scale = b.const("s", torch.tensor([[0.1]]))
    q1 = b.call(ops.quantize, x, scale, None, str(per_tensor(2)))
    q2 = b.call(ops.quantize, x, scale, None, str(per_tensor(2, quant_min=0)))
    program = b.done(b.call(aten.neg.default, q1), b.call(aten.neg.default, q2))

    assert not combine(program).modified


def test_refuses_to_make_outputs_alias() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3, 8)
    scale = b.const("s", torch.tensor([[0.1]]))
    spec = str(per_tensor(2))
    q1 = b.call(ops.quantize, x, scale, None, spec)
    q2 = b.call(ops.quantize, x, scale, None, spec)
    program = b.done(q1, q2)

    assert not combine(program).modified


def test_views_of_equal_size_and_other_meaning_stay_apart() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 4, 4)
    one = b.call(aten.permute.default, x, [1, 0])
    two = b.call(aten.permute.default, x, [0, 1])
    program = b.done(b.call(aten.neg.default, one), b.call(aten.neg.default, two))

    assert not combine(program).modified


def by_hand(b: GraphBuilder, x: Node, top: float = 127) -> Node:
    """Quantize per token, as code without a quantization op does; return what it becomes."""
    peak = b.call(aten.amax.default, b.call(aten.abs.default, x), [-1], True)
    scale = b.call(aten.div.Tensor, b.call(aten.clamp.default, peak, 1e-5), top)
    q = b.call(ops.quantize, x, scale, None, str(per_token(2)))
    return b.call(ops.dequantize, q, scale, None, str(per_token(2)))


@pytest.mark.numeric
def test_golden_scales_computed_by_hand_are_combined() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "m", 8)
    reals = [by_hand(b, x) for _ in range(3)]
    outs = [QuantizedLinear(b, 4, 8).linear(real, f"w{i}") for i, real in enumerate(reals)]
    program = b.done(*outs)

    combine(program, m=6)
    counts = Counter(calls(program))
    for name in ("aten.abs", "aten.amax", "aten.clamp", "aten.div.Tensor", "qfuse.quantize"):
        assert counts[name] == 1, name
    assert not Combine().run(program, RewriteContext("optimize")).modified
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, 8]
%0 = aten.abs(%x): float32[s0, 8]
%1 = aten.amax(%0, (-1), True): float32[s0, 1]
%2 = aten.clamp(%1, 1e-05): float32[s0, 1]
%3 = aten.div.Tensor(%2, 127): float32[s0, 1]
%4 = qfuse.quantize(%x, %3, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): int8[s0, 8]
%5 = qfuse.dequantize(%4, %3, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[s0, 8]
const %w0: int8[4, 8]
const %w0_scale: float32[4, 1]
%6 = qfuse.dequantize(%w0, %w0_scale, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[4, 8]
const %w0_bias: float32[4]
%7 = aten.linear(%5, %6, %w0_bias): float32[s0, 4]
const %w1: int8[4, 8]
const %w1_scale: float32[4, 1]
%8 = qfuse.dequantize(%w1, %w1_scale, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[4, 8]
const %w1_bias: float32[4]
%9 = aten.linear(%5, %8, %w1_bias): float32[s0, 4]
const %w2: int8[4, 8]
const %w2_scale: float32[4, 1]
%10 = qfuse.dequantize(%w2, %w2_scale, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[4, 8]
const %w2_bias: float32[4]
%11 = aten.linear(%5, %10, %w2_bias): float32[s0, 4]
return (%7, %9, %11)""",
    )


def test_refuses_scales_computed_by_hand_from_other_numbers() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3, 8)
    reals = [by_hand(b, x, top) for top in (127, 127.5)]
    program = b.done(*(b.call(aten.neg.default, real) for real in reals))

    combine(program)
    counts = Counter(calls(program))
    assert (counts["aten.clamp"], counts["aten.div.Tensor"], counts["qfuse.quantize"]) == (1, 2, 2)


def test_arithmetic_that_computes_no_parameter_is_left_alone() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3, 8)
    sums = [b.call(aten.amax.default, b.call(aten.abs.default, x), [-1], True) for _ in range(2)]
    program = b.done(*(b.call(aten.neg.default, y) for y in sums))

    assert not combine(program).modified


def test_scales_that_leave_the_graph_stay_apart() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3, 8)
    scales = [b.call(aten.amax.default, x, [-1], True) for _ in range(2)]
    qs = [b.call(ops.quantize, x, s, None, str(per_token(2))) for s in scales]
    program = b.done(*scales, *(b.call(aten.neg.default, q) for q in qs))

    assert not combine(program).modified
