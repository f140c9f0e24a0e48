"""qfuse's own kernel: an RMS norm with a fused quantize."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx.node import Argument

from qfuse.ir.dtypes import FLOATS
from qfuse.ir.ops.norms import RmsNorm
from qfuse.ir.ops.views import dtype_of
from qfuse.ir.quant.spec import dtype_name
from qfuse.ir.refusal import Refusal
from qfuse.lower.operands.rowwise import (
    RowwiseKernel,
    float_vector,
    rowwise_output_args,
    source_args,
)
from qfuse.lower.operands.rowwise_conditions import (
    check_axes,
    check_types,
    check_vectors,
    input_conditions,
    output_conditions,
    residual_conditions,
)
from qfuse.lower.problems.claim import Claim
from qfuse.lower.problems.conditions import Condition, Conditions, hold
from qfuse.lower.problems.rowwise import RowwiseProblem
from qfuse.lower.problems.span import RMS_NORM, Span
from qfuse.rewrite.prelude import Node, Rewriter


@dataclass(frozen=True, slots=True)
class RmsNormQuantized(RowwiseKernel):
    """``qfuse::rms_norm_quantized``."""

    covers: ClassVar[tuple[Span, ...]] = (RMS_NORM,)

    name: str = "qfuse.rms_norm_quantized"

    def conditions(self, problem: RowwiseProblem) -> Conditions:
        """Return those on the result, the operands, and an RMS norm over the last axis."""
        residual = residual_conditions(_norm(problem))
        return (*output_conditions(problem), *input_conditions(problem), *residual, *_NORM)

    def accepts(self, problem: RowwiseProblem) -> Claim | Refusal:
        """Accept an RMS norm over the last axis with float32 statistics."""
        # One statistic: the mean of squares.
        return hold(self.conditions(problem), problem) or problem.claim(statistics=1)

    def emit(self, problem: RowwiseProblem, claim: Claim, rw: Rewriter) -> dict[int, Node]:
        """Emit the call."""
        del claim
        op = problem.op
        assert isinstance(op, RmsNorm), "it was accepted"
        weight, norm = float_vector(op.weight, rw), op.norm
        args: list[Argument] = [
            *source_args(op.x, op.x_params, rw),
            *source_args(op.residual, op.residual_params, rw),
            weight,
            norm.eps,
            norm.rounded,
            norm.out,
        ]
        call = rw.call(
            torch.ops.qfuse.rms_norm_quantized.default, *args, *rowwise_output_args(problem)
        )
        return problem.results(call, rw)


def _norm(problem: RowwiseProblem) -> RmsNorm:
    assert isinstance(problem.op, RmsNorm), "it covers no other op"
    return problem.op


def _check_axes(problem: RowwiseProblem) -> Refusal | None:
    return check_axes(_norm(problem).norm)


def _check_types(problem: RowwiseProblem) -> Refusal | None:
    return check_types(_norm(problem).norm)


def _check_weight(problem: RowwiseProblem) -> Refusal | None:
    return check_vectors(problem, _norm(problem).weight)


def _check_rounding(problem: RowwiseProblem) -> Refusal | None:
    """Refuse a norm that rounds to another dtype than its result's after the weight."""
    op = _norm(problem)
    norm = op.norm
    # The kernel multiplies by the weight in float32 and rounds once,
    # to the dtype of the result. In the source, a bfloat16 value times
    # a float32 weight is float32, so it must not be rounded between.
    scaled = norm.rounded
    if op.weight is not None:
        scaled = torch.promote_types(scaled, dtype_of(op.weight))
    if norm.rounded not in FLOATS or norm.out not in FLOATS:
        return Refusal(f"it rounds to {dtype_name(norm.rounded)}")
    if scaled not in {norm.out, torch.float32}:
        return Refusal(f"it rounds to {dtype_name(scaled)} and then to {dtype_name(norm.out)}")
    return None


_NORM: tuple[Condition[RowwiseProblem], ...] = (
    Condition("it is over the last axis", _check_axes),
    Condition("it computes in float32", _check_types),
    Condition("its weight has one float per column", _check_weight),
    Condition("it rounds once, to the dtype of its result", _check_rounding),
)
