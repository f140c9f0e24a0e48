"""qfuse's own int8 product of two activations, with scales and epilogue fused into it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from qfuse.ir.refusal import Refusal
from qfuse.lower.operands.epilogue import kernel_epilogue
from qfuse.lower.operands.int8_kernel import Int8Product, stored_arguments
from qfuse.lower.operands.matmul import MATMUL_CONDITIONS, int8_work
from qfuse.lower.problems.claim import Claim
from qfuse.lower.problems.conditions import Conditions, hold
from qfuse.lower.problems.matmul import MatmulProblem
from qfuse.lower.problems.span import MATMUL, Span
from qfuse.rewrite.prelude import Node, Rewriter


@dataclass(frozen=True, slots=True)
class MatmulA8A8(Int8Product):
    """8-bit operands, the left one scaled per tensor or row, the right one per tensor or column."""

    covers: ClassVar[tuple[Span, ...]] = (MATMUL,)

    name: str = "qfuse.matmul_a8a8"

    def conditions(self, problem: MatmulProblem) -> Conditions:
        """Return those on the result and on both operands."""
        del problem
        return MATMUL_CONDITIONS

    def accepts(self, problem: MatmulProblem) -> Claim | Refusal:
        """Accept the product with the leading epilogue ops that the kernel knows."""
        return hold(MATMUL_CONDITIONS, problem) or self.claim(problem, partial(int8_work, problem))

    def emit(self, problem: MatmulProblem, claim: Claim, rw: Rewriter) -> dict[int, Node]:
        """Emit the call."""
        fused = problem.fused
        assert fused.other_params is not None, "accepted without parameters"
        args = [
            *self.activation_arguments(problem, rw),
            *stored_arguments(fused.other, fused.other_params, rw),
            *self.step_arguments(problem, kernel_epilogue(problem, claim), rw),
        ]
        return {0: self.call(problem, claim, args, rw)}
