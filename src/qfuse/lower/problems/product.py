"""The common part of the problems of fused matrix products."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

import torch

from qfuse.cost.sizes import SizeRange
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.epilogue import Epilogue
from qfuse.ir.ops.product import FusedProduct, WeightedProduct
from qfuse.lower.problems.claim import Claim
from qfuse.lower.problems.problem import Problem, Replaced
from qfuse.rewrite.prelude import Node


@dataclass(frozen=True, slots=True)
class ProductProblem(Problem):
    """A fused product with an epilogue.

    Attributes:
        fused: The view of the node.
        float_dtype: Float dtype of the result before its epilogue.
    """

    fused: FusedProduct
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
    @abstractmethod
    def outputs(self) -> SizeRange:
        """The elements of the result."""


@dataclass(frozen=True, slots=True)
class WeightedProblem(ProductProblem):
    """A fused product of a weight and an activation: a linear or a convolution.

    Attributes:
        rows: Rows of the matrix product: of the activation, or output pixels of all images.
        n: Output features or channels.
        k: Products per output element.
        in_float: Whether a quantized activation is dequantized first, for the kernels that multiply
            floats by quantized weights.
    """

    fused: WeightedProduct
    rows: SizeRange
    n: int
    k: int
    in_float: bool = field(default=False, kw_only=True)

    @property
    def outputs(self) -> SizeRange:
        """The elements of the result."""
        return self.rows * self.n

    @property
    def weight(self) -> torch.Tensor | None:
        """The quantized weight."""
        return constant_of(self.fused.weight)


def split_epilogue(problem: ProductProblem, claim: Claim) -> tuple[Epilogue, Epilogue]:
    """Split the epilogue into the part that the kernel covers and the rest."""
    steps = problem.fused.epilogue.ops
    return Epilogue(steps[: claim.ops]), Epilogue(steps[claim.ops :])
