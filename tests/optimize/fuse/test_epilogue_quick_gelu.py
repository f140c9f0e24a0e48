from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.epilogue import CASES, Case, ConvCase, calls
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.sizes import same_strides
from qfuse.optimize.fuse.convolution import FuseConvolution
from qfuse.optimize.fuse.epilogue_cast import FuseCast
from qfuse.optimize.fuse.epilogue_quick_gelu import FuseQuickGelu
from qfuse.optimize.fuse.linear import FuseLinear
from qfuse.optimize.fuse.matmul import FuseMatmul
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import PassResult
from qfuse.rewrite.driver import apply_rules
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten
mul, sigmoid = aten.mul.Tensor, aten.sigmoid.default


def quick_gelu(case: Case, y: Node, factor: Any = 1.702, *, swapped: bool = False) -> Node:
    scaled = case.b.call(mul, y, factor)
    pair = (case.b.call(sigmoid, scaled), y)
    return case.b.call(mul, *(pair if swapped else pair[::-1]))


def fuse(program: NormalGraph) -> PassResult:
    apply_rules(program, [FuseLinear(), FuseConvolution(), FuseMatmul(), FuseCast()])
    return apply_rules(program, [FuseQuickGelu()])


@pytest.mark.numeric
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("swapped", [False, True])
def test_values_agree(kind: str, swapped: bool) -> None:
    case = CASES[kind]()
    program = case.done(quick_gelu(case, case.y, swapped=swapped))
    source = clone(program)

    assert fuse(program).fired == {"fuse-quick-gelu": 1}
    assert calls(program)[-1] == f"{kind}[act(quick_gelu,1.702)]"
    inputs = random_inputs(program, m=7)
    for new, old in zip(run(program, inputs), run(source, inputs), strict=True):
        torch.testing.assert_close(new, old)
        assert same_strides(new, old)


def test_golden_the_steps_in_between_are_gone() -> None:
    case = Case()
    factor = case.b.const("factor", torch.tensor(1.5))
    program = case.done(quick_gelu(case, case.y, factor))

    assert fuse(program).fired == {"fuse-quick-gelu": 1}
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, 8]
%r: float32[s0, 4]
const %x_scale: float32[1, 1]
const %x_zero: int32[1, 1]
%0 = qfuse.quantize(%x, %x_scale, %x_zero, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): int8[s0, 8]
const %w: int8[4, 8]
const %w_scale: float32[4, 1]
const %w_bias: float32[4]
%1 = qfuse.linear(%0, %x_scale, %x_zero, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int', %w, %w_scale, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int', %w_bias, None, None, '', 'act(quick_gelu,1.5)', ()): float32[s0, 4]
return (%1)""",
    )


@pytest.mark.numeric
def test_a_narrow_type_is_rounded_once() -> None:
    case = ConvCase()
    narrow = case.b.call(aten._to_copy.default, case.y, dtype=torch.bfloat16)
    program = case.done(quick_gelu(case, narrow))
    source = clone(program)

    assert fuse(program).fired == {"fuse-quick-gelu": 1}
    inputs = random_inputs(program, m=2)
    (new,), (old,) = run(program, inputs), run(source, inputs)
    assert new.dtype is torch.bfloat16
    torch.testing.assert_close(new, old)


@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_refuses_a_factor_that_is_not_finite(factor: float) -> None:
    case = Case()
    program = case.done(quick_gelu(case, case.y, factor))

    assert [m.code for _, m in fuse(program).misses] == [MissCode.ARGUMENT]


@pytest.mark.parametrize("which", ["product", "scaled", "gate"])
def test_refuses_values_that_others_read(which: str) -> None:
    case = Case()
    y = quick_gelu(case, case.y)
    (gate,) = [n for n in y.all_input_nodes if n is not case.y]
    (scaled,) = gate.all_input_nodes
    others = {"product": case.y, "scaled": scaled, "gate": gate}
    program = case.done(y, others[which])

    assert [m.code for _, m in fuse(program).misses] == [MissCode.SHARED]


def test_refuses_other_operands_and_does_not_report_them() -> None:
    case = Case()
    program = case.done(quick_gelu(case, case.residual))
    result = fuse(program)

    assert not result.modified
    assert result.misses == []
