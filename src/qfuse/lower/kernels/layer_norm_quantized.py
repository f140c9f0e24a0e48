"""qfuse's own kernel: a layer norm with a fused quantize."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx.node import Argument

from qfuse.ir.dtypes import FLOATS
from qfuse.ir.ops.norm_spec import NormSpec, Statistic
from qfuse.ir.ops.norms import LayerNorm
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
from qfuse.lower.problems.span import LAYER_NORM, Span
from qfuse.rewrite.prelude import Node, Rewriter


@dataclass(frozen=True, slots=True)
class LayerNormQuantized(RowwiseKernel):
    """``qfuse::layer_norm_quantized``."""

    covers: ClassVar[tuple[Span, ...]] = (LAYER_NORM,)

    name: str = "qfuse.layer_norm_quantized"

    def accepts(self, problem: RowwiseProblem) -> Claim | Refusal:
        """Accept a layer norm over the last axis that rounds once, after the bias."""
        op = problem.op
        assert isinstance(op, LayerNorm), "it covers no other op"
        refusal = (
            check_output(problem)
            or check_source(op.x, op.x_params, "input")
            or check_residual(op)
            or _check_centred(op.norm)
            or check_vectors(problem, op.weight, op.bias)
        )
        # Two statistics: the mean and the variance.
        return refusal or problem.claim(statistics=2)

    def emit(self, problem: RowwiseProblem, claim: Claim, rw: Rewriter) -> dict[int, Node]:
        """Emit the call."""
        del claim
        op = problem.op
        assert isinstance(op, LayerNorm), "it was accepted"
        weight, bias = float_vector(op.weight, rw), float_vector(op.bias, rw)
        args: list[Argument] = [
            *source_args(op.x, op.x_params, rw),
            *source_args(op.residual, op.residual_params, rw),
            weight,
            bias,
            op.norm.eps,
            op.norm.out,
        ]
        call = rw.call(
            torch.ops.qfuse.layer_norm_quantized.default, *args, *rowwise_output_args(problem)
        )
        return problem.results(call, rw)


def _check_centred(norm: NormSpec) -> Refusal | None:
    if norm.axes != 1:
        return Refusal(f"it is over {norm.axes} axes")
    if norm.statistic is Statistic.WHOLE:
        # torch computes in float32 and rounds once, to the input's dtype.
        if norm.compute not in {norm.out, torch.float32} or norm.out not in FLOATS:
            types = f"{dtype_name(norm.compute)} and then to {dtype_name(norm.out)}"
            return Refusal(f"it rounds to {types}")
        return None
    refusal = check_types(norm)
    if refusal is None and norm.rounded is not torch.float32:
        return Refusal(f"it rounds to {dtype_name(norm.rounded)} before the weight")
    return refusal
