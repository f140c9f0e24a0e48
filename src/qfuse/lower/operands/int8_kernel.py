"""Shared code of qfuse's kernels of quantized activations: operands, claim and call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.fx.node import Argument

from qfuse.cost.work import WorkRange
from qfuse.ir.dtypes import bit_width
from qfuse.ir.ops.views import QuantParams
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
from qfuse.lower.operands.own_kernel import OwnKernel, PackingKernel
from qfuse.lower.problems.claim import Claim
from qfuse.lower.problems.epilogue_text import KernelEpilogue
from qfuse.lower.problems.product import ProductProblem, WeightedProblem
from qfuse.rewrite.prelude import Node, Rewriter


class Int8Product(OwnKernel):
    """A product of quantized operands with an epilogue, as two ops.

    ``qfuse::name`` returns floats, ``qfuse::name_quantized`` quantized values with static
    parameters.
    """

    __slots__ = ()

    def claim(self, problem: ProductProblem, work: Callable[[int], Sequence[WorkRange]]) -> Claim:
        """Return the claim of the leading epilogue ops that the kernels know.

        Args:
            problem: The accepted product.
            work: Returns the work of the product, given the bits of an element of its result.
        """
        steps = covered_ops(problem)
        output = claims_output(problem, steps)
        product = work(8 if output else bit_width(float_out(problem.fused)))
        return Claim(steps, output, [*product, *loops_behind(problem, steps)])

    def activation_arguments(self, problem: ProductProblem, rw: Rewriter) -> list[Argument]:
        """Return the activation, its scale and its zero point."""
        fused, params = problem.fused, problem.fused.x_params
        assert params is not None, "accepted without activation params"
        return stored_arguments(fused.x, params, rw)

    def call(
        self, problem: ProductProblem, claim: Claim, args: list[Argument], rw: Rewriter
    ) -> Node:
        """Emit the call of the op for the claimed output, with the leading arguments ``args``."""
        if not claim.output:
            return rw.call(self.op(), *args, claimed_dtype(problem, claim))
        params = problem.fused.out_params
        assert params is not None, "the claim covers the output"
        return rw.call(self.op("_quantized"), *args, *output_args(params, rw))

    @staticmethod
    def step_arguments(
        problem: ProductProblem, steps: KernelEpilogue, rw: Rewriter
    ) -> list[Argument]:
        """Return the epilogue, and the float dtype of the product."""
        return [epilogue_operands(steps, rw), steps.text, problem.float_dtype]


class Int8Kernel(Int8Product, PackingKernel):
    """A product of quantized activations and a packed weight."""

    __slots__ = ()

    def epilogue_arguments(
        self,
        problem: WeightedProblem,
        steps: KernelEpilogue,
        rw: Rewriter,
        geometry: list[Argument],
    ) -> list[Argument]:
        """Return the bias, ``geometry``, the epilogue, and the float dtype of the product."""
        return [float_bias(problem, rw), *geometry, *self.step_arguments(problem, steps, rw)]


def stored_arguments(q: Node, params: QuantParams, rw: Rewriter) -> list[Argument]:
    """Return quantized values, their scale and their zero point."""
    zero = params.zero_point
    return [
        q,
        scale_node(params, rw),
        None if zero is None else stored_zero(zero, params.spec.dtype, rw),
    ]
