"""qfuse's own kernel: a layer norm with a fused quantize."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx.node import Argument

from qfuse.ir.dtypes import FLOATS
from qfuse.ir.ops.norm_spec import Statistic
from qfuse.ir.ops.norms import LayerNorm
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
from qfuse.lower.problems.span import LAYER_NORM, Span
from qfuse.rewrite.prelude import Node, Rewriter


@dataclass(frozen=True, slots=True)
class LayerNormQuantized(RowwiseKernel):
    """``qfuse::layer_norm_quantized``."""

    covers: ClassVar[tuple[Span, ...]] = (LAYER_NORM,)

    name: str = "qfuse.layer_norm_quantized"

    def conditions(self, problem: RowwiseProblem) -> Conditions:
        """Return those on the result, the operands, and a layer norm over the last axis."""
        residual = residual_conditions(_norm(problem))
        return (*output_conditions(problem), *input_conditions(problem), *residual, *_NORM)

    def accepts(self, problem: RowwiseProblem) -> Claim | Refusal:
        """Accept a layer norm over the last axis that rounds once, after the bias."""
        # Two statistics: the mean and the variance.
        return hold(self.conditions(problem), problem) or problem.claim(statistics=2)

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


def _norm(problem: RowwiseProblem) -> LayerNorm:
    assert isinstance(problem.op, LayerNorm), "it covers no other op"
    return problem.op


def _check_axes(problem: RowwiseProblem) -> Refusal | None:
    return check_axes(_norm(problem).norm)


def _check_rounding(problem: RowwiseProblem) -> Refusal | None:
    norm = _norm(problem).norm
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


def _check_vectors(problem: RowwiseProblem) -> Refusal | None:
    op = _norm(problem)
    return check_vectors(problem, op.weight, op.bias)


_NORM: tuple[Condition[RowwiseProblem], ...] = (
    Condition("it is over the last axis", _check_axes),
    Condition("it computes in float32 and rounds once", _check_rounding),
    Condition("its weight and bias have one float per column", _check_vectors),
)
