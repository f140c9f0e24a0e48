"""The common part of the problems of fused matrix products: linears and convolutions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qfuse.cost.sizes import SizeRange
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.epilogue import Epilogue
from qfuse.ir.ops.product import FusedProduct
from qfuse.lower.problems.claim import Claim
from qfuse.lower.problems.problem import Problem, Replaced
from qfuse.rewrite.prelude import Node


@dataclass(frozen=True, slots=True)
class ProductProblem(Problem):
    """A fused op of a weight and an activation, with an epilogue.

    Attributes:
        fused: The view of the node.
        rows: Rows of the matrix product: of the activation, or output pixels of all images.
        n: Output features or channels.
        k: Products per output element.
        float_dtype: Float dtype of the result before its epilogue.
    """

    fused: FusedProduct
    rows: SizeRange
    n: int
    k: int
    float_dtype: torch.dtype

    @property
    def place(self) -> Node:
        """The fused op."""
        return self.fused.node

    @property
    def anchor(self) -> Node:
        """The fused op."""
        return self.fused.node

    @property
    def replaced(self) -> tuple[Replaced, ...]:
        """The fused op."""
        return (Replaced(self.fused.node),)

    @property
    def weight(self) -> torch.Tensor | None:
        """The quantized weight."""
        return constant_of(self.fused.weight)


def split_epilogue(problem: ProductProblem, claim: Claim) -> tuple[Epilogue, Epilogue]:
    """Split the epilogue into the part that the kernel covers and the rest."""
    steps = problem.fused.epilogue.ops
    return Epilogue(steps[: claim.ops]), Epilogue(steps[claim.ops :])
