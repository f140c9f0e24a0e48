from __future__ import annotations

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
from qfuse.optimize.fuse.epilogue_activation import FuseActivation
from qfuse.optimize.fuse.epilogue_add import FuseAdd
from qfuse.optimize.fuse.epilogue_batch_norm import FuseBatchNorm
from qfuse.optimize.fuse.epilogue_cast import FuseCast
from qfuse.optimize.fuse.linear import FuseLinear
from qfuse.optimize.fuse.matmul import FuseMatmul
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import PassResult
from qfuse.rewrite.driver import apply_rules
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten
NATIVE, PLAIN = aten._native_batch_norm_legit_no_training.default, aten.batch_norm.default


def normed(case: Case, y: Node, n: int = 4, *, plain: bool = True, **changes: Any) -> Node:
    """Add a norm of ``y``; return its result."""
    b = case.b
    known = [torch.randn(n), torch.randn(n), torch.randn(n), torch.rand(n) + 0.1]
    given = [b.const(name, t) for name, t in zip(("g", "b", "mean", "var"), known, strict=True)]
    if changes.get("runtime"):
        given[2] = b.arg("mean", torch.float32, n)
    if plain:
        return b.call(PLAIN, y, *given, changes.get("training", False), 0.1, 1e-5, False)
    return b.item(b.call(NATIVE, y, *given, 0.1, 1e-5), 0)


def fuse(program: NormalGraph) -> PassResult:
    """Fuse; values stay within rounding, and strides as they are."""
    apply_rules(
        program, [FuseLinear(), FuseConvolution(), FuseMatmul(), FuseActivation(), FuseAdd()]
    )
    source = clone(program)
    result = apply_rules(program, [FuseBatchNorm()])
    inputs = random_inputs(program, m=3)
    for new, old in zip(run(program, inputs), run(source, inputs), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-5)
        assert same_strides(new, old)
    return result


@pytest.mark.numeric
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("plain", [False, True])
def test_a_norm_after_an_activation(kind: str, plain: bool) -> None:
    case = CASES[kind]()
    program = case.done(normed(case, case.b.call(aten.relu.default, case.y), plain=plain))

    assert fuse(program).fired == {"fuse-batch-norm": 1}
    assert calls(program)[-1] == f"{kind}[act(relu)|mul(0)|add(1,1.0)]"


@pytest.mark.numeric
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_norm_after_a_residual(channels_last: bool) -> None:
    case = ConvCase(channels_last=channels_last)
    total = case.b.call(aten.add.Tensor, case.y, case.residual)
    program = case.done(case.b.call(aten.relu.default, normed(case, total)))

    assert fuse(program).fired == {"fuse-batch-norm": 1}


def test_golden_the_norm_is_two_operands() -> None:
    case = ConvCase()
    program = case.done(normed(case, case.b.call(aten.relu.default, case.y)))

    assert fuse(program).fired == {"fuse-batch-norm": 1}
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, 3, 6, 5]
%r: float32[s0, 4, 5, 4]
const %w_s: float32[4, 1, 1, 1]
const %w: int8[4, 3, 2, 2]
const %bias: float32[4]
const %x_scale: float32[1, 1, 1, 1]
const %x_zero: int32[1, 1, 1, 1]
%0 = qfuse.quantize(%x, %x_scale, %x_zero, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int'): int8[s0, 3, 6, 5]
const %w_norm_factor: float32[4, 1, 1]
const %w_norm_shift: float32[4, 1, 1]
%1 = qfuse.convolution(%0, %x_scale, %x_zero, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int', %w, %w_s, None, 'int8[-128,127] 1x*x*x* float32 float32:reciprocal:round-zp int', %bias, (1, 1), (0, 0), (1, 1), False, (0, 0), 1, None, None, '', 'act(relu)|mul(0)|add(1,1.0)', (%w_norm_factor, %w_norm_shift)): float32[s0, 4, 5, 4]
return (%1)""",
    )


def test_refuses_another_axis() -> None:
    linear, unbatched = Case(rank=4), ConvCase(batched=False)
    cases = [(linear, 3), (unbatched, 5)]
    for case, size in cases:
        program = case.done(normed(case, case.y, size))

        assert last_miss(program).code is MissCode.SHAPE


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"training": True}, MissCode.ARGUMENT), ({"runtime": True}, MissCode.NOT_CONSTANT)],
)
def test_refuses_other_statistics(changes: dict[str, Any], code: MissCode) -> None:
    case = ConvCase()
    program = case.done(normed(case, case.y, **changes))

    assert last_miss(program).code is code


def test_refuses_narrow_floats() -> None:
    case = ConvCase()
    narrow = case.b.call(aten._to_copy.default, case.y, dtype=torch.bfloat16)
    program = case.done(normed(case, narrow))
    apply_rules(program, [FuseConvolution(), FuseCast()])

    assert last_miss(program).code is MissCode.DTYPE


@pytest.mark.parametrize("kind", CASES)
def test_refuses_a_product_that_others_read(kind: str) -> None:
    case = CASES[kind]()
    program = case.done(normed(case, case.y), case.y)

    assert last_miss(program).code is MissCode.SHARED


def last_miss(program: NormalGraph) -> Any:
    result = fuse(program)
    assert not result.modified
    (miss,) = [m for _, m in result.misses]
    return miss
