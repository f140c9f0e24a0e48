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
    check_output,
    check_residual,
    check_source,
    check_types,
    check_vectors,
    float_vector,
    rowwise_output_args,
    source_args,
)
from qfuse.lower.problems.claim import Claim
from qfuse.lower.problems.rowwise import RowwiseProblem
from qfuse.lower.problems.span import RMS_NORM, Span
from qfuse.rewrite.prelude import Node, Rewriter


@dataclass(frozen=True, slots=True)
class RmsNormQuantized(RowwiseKernel):
    """``qfuse::rms_norm_quantized``."""

    covers: ClassVar[tuple[Span, ...]] = (RMS_NORM,)

    name: str = "qfuse.rms_norm_quantized"

    def accepts(self, problem: RowwiseProblem) -> Claim | Refusal:
        """Accept an RMS norm over the last axis with float32 statistics."""
        op = problem.op
        assert isinstance(op, RmsNorm), "it covers no other op"
        refusal = (
            check_output(problem)
            or check_source(op.x, op.x_params, "input")
            or check_residual(op)
            or check_types(op.norm)
            or check_vectors(problem, op.weight)
            or _check_rounding(op)
        )
        # One statistic: the mean of squares.
        return refusal or problem.claim(statistics=1)

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


def _check_rounding(op: RmsNorm) -> Refusal | None:
    """Refuse a norm that rounds to another dtype than its result's after the weight."""
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
