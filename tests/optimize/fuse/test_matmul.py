from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.matmul import Products, rowwise
from tests.support.values import bits_same
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import NormalGraph, StageGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.matmul import FusedMatmul, as_fused_matmul
from qfuse.ir.stages.verify import STAGES, verify_node
from qfuse.optimize import optimize
from qfuse.optimize.fuse.matmul import FuseMatmul
from qfuse.optimize.merge.merge_linears import MergeLinears
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rule import Miss
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_tensor, stored_like
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten
F32 = torch.float32


def fused(program: StageGraph) -> list[FusedMatmul]:
    """Return the fused products."""
    return [view for node in program.graph.nodes if (view := as_fused_matmul(node))]


def fuse(program: NormalGraph, **sizes: int) -> FusedMatmul:
    """Optimize; values and strides must stay the same."""
    source = clone(program)
    done = optimize(program)
    (found,) = fused(done)
    inputs = random_inputs(source, **sizes)
    got, want = run(done, inputs), run(source, inputs)
    assert bits_same(got, want)
    assert [y.stride() for y in got] == [y.stride() for y in want]
    return found


def refusal(program: NormalGraph) -> Miss:
    """Return why the rule, which must refuse once, does not fire."""
    result = apply_rules(program, [FuseMatmul()])
    assert not result.modified
    (miss,) = [m for _, m in result.misses]
    return miss


def test_golden_a_transposed_operand_is_a_view() -> None:
    case = Products()
    program = case.done(case.product())
    found = fuse(program, m=7)

    assert not found.other.meta["val"].is_contiguous()
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[2, 3, s0, 8]
const %x_scale: float32[1, 1, 1, 1]
const %x_zero: int32[1, 1, 1, 1]
%0 = qfuse.quantize(%x, %x_scale, %x_zero, 'uint8[0,255] *x*x*x* float32 float32:reciprocal:round-zp int'): uint8[2, 3, s0, 8]
%k: float32[2, 3, 5, 8]
const %k_scale: float32[1, 1, 1, 1]
const %k_zero: int32[1, 1, 1, 1]
%1 = qfuse.quantize(%k, %k_scale, %k_zero, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int'): int8[2, 3, 5, 8]
%2 = aten.permute(%1, (0, 1, 3, 2)): int8[2, 3, 8, 5]
%3 = qfuse.matmul(%0, %x_scale, %x_zero, 'uint8[0,255] *x*x*x* float32 float32:reciprocal:round-zp int', %2, %k_scale, %k_zero, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int', None, None, '', '', ()): float32[2, 3, s0, 5]
return (%3)""",
    )


def test_golden_a_scale_and_a_mask_are_its_epilogue() -> None:
    case = Products(specs=rowwise(4))
    mask = case.b.arg("mask", F32, 2, 1, 1, 5)
    scaled = case.b.call(aten.mul.Tensor, case.product(), 0.125)
    program = case.done(case.b.call(aten.add.Tensor, scaled, mask))
    found = fuse(program, m=7)

    assert str(found.epilogue) == "mul(0)|add(1,1.0)"
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[2, 3, s0, 8]
%0 = qfuse.choose_qparams(%x, 'ao-symmetric int8[-128,127] 1x1x1x* eps=1e-07 float32 int32'): (float32[2, 3, s0, 1], int32[2, 3, s0, 1])
%1 = getitem(%0, 0): float32[2, 3, s0, 1]
%2 = qfuse.quantize(%x, %1, None, 'int8[-128,127] 1x1x1x* float32 float32:reciprocal:round-zp int'): int8[2, 3, s0, 8]
%k: float32[2, 3, 5, 8]
%3 = qfuse.choose_qparams(%k, 'ao-symmetric int8[-128,127] 1x1x1x* eps=1e-07 float32 int32'): (float32[2, 3, 5, 1], int32[2, 3, 5, 1])
%4 = getitem(%3, 0): float32[2, 3, 5, 1]
%5 = qfuse.quantize(%k, %4, None, 'int8[-128,127] 1x1x1x* float32 float32:reciprocal:round-zp int'): int8[2, 3, 5, 8]
%mask: float32[2, 1, 1, 5]
%6 = aten.permute(%5, (0, 1, 3, 2)): int8[2, 3, 8, 5]
%7 = aten.reshape(%4, (2, 3, 1, 5)): float32[2, 3, 1, 5]
const %number: float32[]
%8 = qfuse.matmul(%2, %1, None, 'int8[-128,127] 1x1x1x* float32 float32:reciprocal:round-zp int', %6, %7, None, 'int8[-128,127] 1x1x*x1 float32 float32:reciprocal:round-zp int', None, None, '', 'mul(0)|add(1,1.0)', (%number, %mask)): float32[2, 3, s0, 5]
return (%8)""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("above", [False, True])
def test_a_transpose_on_either_side_of_the_quantize(above: bool) -> None:
    case = Products()
    if above:
        k = case.b.arg("t", F32, 2, 3, 5, 8)
        turned = case.b.call(aten.permute.default, k, [0, 1, 3, 2])
        other = case.quantized(turned, per_tensor(4), "t")
    else:
        other = case.other
    found = fuse(case.done(case.b.call(aten.matmul.default, case.x, other)), m=7)

    assert found.other.meta["val"].shape[-2:] == (8, 5)
    assert found.other.meta["val"].stride(-2) == 1


@pytest.mark.numeric
@pytest.mark.parametrize("spelled", ["matmul", "bmm", "mm"])
@pytest.mark.parametrize("rows", [False, True])
def test_every_spelling(spelled: str, rows: bool) -> None:
    lead = {"matmul": (2, 3), "bmm": (3,), "mm": ()}[spelled]
    rank = len(lead) + 2
    case = Products((*lead, "m", 8), (*lead, 5, 8), rowwise(rank) if rows else None)
    op = getattr(aten, spelled).default

    found = fuse(case.done(case.b.call(op, case.x, case.other)), m=7)
    assert found.x_params is not None
    assert found.other_params is not None
    # One scale per row of the keys is one per column of their transpose.
    assert found.other_params.spec.block == (
        (*(1,) * len(lead), None, 1) if rows else (None,) * rank
    )


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("x", "k"), [((2, 3, "m", 8), (3, 5, 8)), ((1, "m", 8), (4, 5, 8)), (("b", "m", 8), (1, 5, 8))]
)
def test_batch_axes_that_broadcast(x: Any, k: Any) -> None:
    case = Products(x, k)

    assert fuse(case.done(case.product()), m=7, b=3).batch is not None


@pytest.mark.numeric
def test_a_shared_dequantize_stays_for_its_other_users() -> None:
    case = Products()
    program = case.done(case.product(), case.b.call(aten.exp.default, case.x))
    source = clone(program)
    done = optimize(program)
    assert len(fused(done)) == 1
    inputs = random_inputs(source, m=3)
    assert bits_same(run(done, inputs), run(source, inputs))


@pytest.mark.numeric
def test_the_same_tensor_on_both_sides() -> None:
    b = GraphBuilder()
    q, scale = b.arg("q", torch.int8, 3, 6, 6), b.const("scale", torch.full((1, 1, 1), 0.1))
    spec = str(per_tensor(3))
    x = b.call(ops.dequantize, q, scale, None, spec)
    found = fuse(b.done(b.call(aten.bmm.default, x, x)))
    assert found.x is found.other


@pytest.mark.numeric
def test_a_whole_attention_block_with_static_parameters() -> None:
    case = Products((2, 3, "m", 8), (2, 3, 5, 8))
    scores = case.b.call(aten.mul.Tensor, case.product(), 0.3)
    weights = case.b.call(aten.softmax.int, scores, -1)
    p = case.quantized(weights, per_tensor(4, torch.uint8), "p")
    v = case.quantized(case.b.arg("v", F32, 2, 3, 5, 16), per_tensor(4), "v")
    out = case.b.call(aten.matmul.default, p, v)
    program = case.done(case.quantized(out, per_tensor(4), "out"))
    source = clone(program)
    done = optimize(program)
    one, two = fused(done)

    assert (str(one.epilogue), str(two.epilogue)) == ("mul(0)", "")
    assert (one.out_params is None, two.out_params is None) == (True, False)
    inputs = random_inputs(source, m=4)
    assert bits_same(run(done, inputs), run(source, inputs))


def test_merging_leaves_products_of_activations_alone() -> None:
    case = Products()
    other = case.b.call(aten.relu.default, case.other)
    again = case.b.call(aten.matmul.default, case.x, other)
    program = case.done(case.product(), again)

    assert not MergeLinears().run(program, RewriteContext("optimize")).modified


def of(case: Products, x: Node, other: Node, op: Any = aten.matmul.default) -> NormalGraph:
    """Finish with a product."""
    return case.done(case.b.call(op, x, other))


@pytest.mark.parametrize("side", ["left", "right"])
def test_refuses_one_float_operand(side: str) -> None:
    case = Products()
    plain = case.b.arg("plain", F32, *((2, 3, 4, 8) if side == "left" else (2, 3, 8, 5)))
    k = case.quantized(case.b.arg("t", F32, 2, 3, 8, 5), per_tensor(4), "t")
    program = of(case, *((plain, k) if side == "left" else (case.x, plain)))

    miss = refusal(program)
    assert (miss.code, miss.at) == (MissCode.NOT_QUANTIZED, plain)
    assert miss.reason == f"the {side} operand is torch.float32, the other one is quantized"


@pytest.mark.parametrize("side", ["left", "right"])
def test_refuses_a_constant(side: str) -> None:
    case = Products((2, 3, 4, 8))
    shape = (2, 3, 4, 8) if side == "left" else (2, 3, 8, 5)
    spec = per_tensor(4)
    scale = case.b.const("scale", torch.full((1, 1, 1, 1), 0.1))
    stored = case.b.const("stored", stored_like(spec, *shape))
    weight = case.b.call(ops.dequantize, stored, scale, None, str(spec))
    k = case.quantized(case.b.arg("t", F32, 2, 3, 8, 5), spec, "t")
    program = of(case, *((weight, k) if side == "left" else (case.x, weight)))

    miss = refusal(program)
    assert (miss.code, miss.at) == (MissCode.PATTERN, stored)
    assert miss.reason == f"the {side} operand is a constant, this op multiplies two activations"


def test_refuses_an_operand_of_one_axis() -> None:
    case = Products((2, 3, 4, 8))
    vector = case.quantized(case.b.arg("v", F32, 8), per_tensor(1), "v")

    miss = refusal(of(case, case.x, vector))
    assert miss.code is MissCode.SHAPE
    assert miss.reason == "a product of shapes (2, 3, 4, 8) and (8,) has an operand of one axis"


def test_refuses_a_result_that_is_not_contiguous() -> None:
    case = Products((2, 4, 8), (2, 8, 5))
    product = case.b.call(aten.matmul.default, case.x, case.k)
    product.meta["val"] = product.meta["val"].mT.contiguous().mT

    miss = refusal(case.done(product))
    assert (miss.code, miss.at) == (MissCode.SHAPE, product)
    assert miss.reason == "the result of shapes (2, 4, 8) and (2, 8, 5) is not contiguous"


def test_refuses_batch_axes_that_may_differ() -> None:
    case = Products(("b", "m", 8), ("b", 5, 8))
    product = case.product()
    late = case.quantized(case.b.arg("late", F32, 4, 8, 5), per_tensor(3), "late")
    # A trace of the product would have made the sizes equal.
    product.args = (product.args[0], late)
    late.append(product)

    miss = refusal(case.done(product))
    assert (miss.code, miss.at) == (MissCode.SHAPE, product)
    assert "are not known to broadcast" in miss.reason


def test_float_products_are_not_reported() -> None:
    b = GraphBuilder()
    x, k = b.arg("x", F32, 4, 8), b.arg("k", F32, 8, 5)
    program = b.done(b.call(aten.mm.default, x, k))
    result = apply_rules(program, [FuseMatmul()])

    assert (result.modified, list(result.misses)) == (False, [])


def test_every_node_is_verified() -> None:
    case = Products()
    program = case.done(case.product())
    done = optimize(program)
    for node in done.graph.nodes:
        verify_node(node, STAGES["optimized"])
    assert len(fused(done)) == 1
