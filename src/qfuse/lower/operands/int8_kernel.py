"""Shared code of qfuse's kernels of quantized activations: operands, claim and call."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx.node import Argument

from qfuse.cost.work import WorkRange
from qfuse.ir.dtypes import bit_width
from qfuse.lower.operands.checks import (
    float_bias,
    float_out,
    output_args,
    scale_node,
    stored_zero,
)
from qfuse.lower.operands.epilogue import (
    claimed_dtype,
    claims_output,
    covered_ops,
    epilogue_operands,
    loops_behind,
)
from qfuse.lower.operands.own_kernel import PackingKernel
from qfuse.lower.problems.claim import Claim
from qfuse.lower.problems.epilogue_text import KernelEpilogue
from qfuse.lower.problems.product import ProductProblem
from qfuse.rewrite.prelude import Node, Rewriter


class Int8Kernel(PackingKernel):
    """A product of quantized activations with an epilogue, as two ops.

    ``qfuse::name`` returns floats, ``qfuse::name_quantized`` quantized values with static
    parameters.
    """

    __slots__ = ()

    def claim(self, problem: ProductProblem, work: Callable[[int], WorkRange]) -> Claim:
        """Return the claim of the leading epilogue ops that the kernels know.

        Args:
            problem: The accepted product.
            work: Returns the work of the product, given the bits of an element of its result.
        """
        steps = covered_ops(problem)
        output = claims_output(problem, steps)
        product = work(8 if output else bit_width(float_out(problem.fused)))
        return Claim(steps, output, [product, *loops_behind(problem, steps)])

    def activation_arguments(self, problem: ProductProblem, rw: Rewriter) -> list[Argument]:
        """Return the activation, its scale and its zero point."""
        fused, x = problem.fused, problem.fused.x_params
        assert x is not None, "accepted without activation params"
        zero = x.zero_point
        return [
            fused.x,
            scale_node(x, rw),
            None if zero is None else stored_zero(zero, x.spec.dtype, rw),
        ]

    def epilogue_arguments(
        self, problem: ProductProblem, steps: KernelEpilogue, rw: Rewriter, geometry: list[Argument]
    ) -> list[Argument]:
        """Return the bias, ``geometry``, the epilogue, and the float dtype of the product."""
        return [
            float_bias(problem, rw),
            *geometry,
            epilogue_operands(steps, rw),
            steps.text,
            problem.float_dtype,
        ]

    def call(
        self, problem: ProductProblem, claim: Claim, args: list[Argument], rw: Rewriter
    ) -> Node:
        """Emit the call of the op for the claimed output, with the leading arguments ``args``."""
        if not claim.output:
            return rw.call(self.op(), *args, claimed_dtype(problem, claim))
        params = problem.fused.out_params
        assert params is not None, "the claim covers the output"
        return rw.call(self.op("_quantized"), *args, *output_args(params, rw))
