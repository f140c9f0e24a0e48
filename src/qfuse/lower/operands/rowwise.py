"""Shared code of qfuse's rowwise kernels: norms and activations with a fused quantize."""

from __future__ import annotations

import torch
from torch.fx.node import Argument

from qfuse.ir.ops.output import ExtraOutput
from qfuse.ir.ops.views import QuantParams, dtype_of
from qfuse.ir.refusal import Refusal
from qfuse.lower.operands.checks import typed
from qfuse.lower.operands.own_kernel import OwnKernel
from qfuse.lower.problems.rowwise import RowwiseProblem
from qfuse.rewrite.prelude import Node, Rewriter
from qfuse.targets.target import Target


class RowwiseKernel(OwnKernel):
    """A kernel that loads each row once."""

    __slots__ = ()

    def supported(self, target: Target) -> Refusal | None:
        """Refuse if the kernels could not be built, or would run without vector instructions."""
        refusal = OwnKernel.supported(self, target)
        if refusal is not None:
            return refusal
        if self.library.instruction_sets[-1] == "portable":
            return Refusal("the processor has no supported vector instructions")
        return None


def source_args(x: Node | None, params: QuantParams | None, rw: Rewriter) -> list[Argument]:
    """Return the arguments of an operand: values, scale, zero point, float dtype."""
    if x is None:
        # Without an operand its dtype has no meaning.
        return [None, None, None, torch.float32]
    if params is None:
        return [x, None, None, dtype_of(x)]
    # Ahead of time, not in every call.
    scale = typed(params.scale, torch.float32, rw)
    zero = params.zero_point
    return [
        x,
        scale,
        None if zero is None else typed(zero, torch.float32, rw),
        params.spec.float_dtype,
    ]


def float_vector(node: Node | None, rw: Rewriter) -> Node | None:
    """Return a vector in the kernel's dtype; constants are converted ahead of time."""
    return None if node is None else typed(node, torch.float32, rw)


def rowwise_output_args(problem: RowwiseProblem) -> list[Argument]:
    """Return the output quantization arguments of a rowwise kernel."""
    spec, choose, params = problem.spec, problem.output.choose, problem.output.params
    math = spec.arithmetic
    given: list[Argument] = [None, None] if params is None else [params.scale, params.zero_point]
    # Static parameters: the empty formula tells the kernel to choose nothing.
    chosen: list[Argument] = ["", 0.0, torch.float32, torch.int32]
    if choose is not None:
        chosen = [str(choose.formula), choose.eps, choose.scale_dtype, choose.zero_point_dtype]
    keep = problem.output.keep
    return [
        *given,
        *chosen,
        spec.quant_min,
        spec.quant_max,
        spec.dtype,
        math.compute,
        math.reciprocal,
        math.zero_point_first,
        ExtraOutput.FLOAT in keep,
        ExtraOutput.SUM in keep,
    ]
