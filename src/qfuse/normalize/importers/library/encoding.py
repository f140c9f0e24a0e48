"""Operands of library products: quantized values with their parameters, and their dequantize."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import TypeVar

import torch

from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.quant.spec import QuantSpec
from qfuse.ir.sizes import same_size
from qfuse.normalize.importers.qdq import Recipe
from qfuse.normalize.importers.rule import RefusedError, SourceRule
from qfuse.normalize.match.constants import derived, evaluated
from qfuse.rewrite.prelude import Exactness, MissCode, Node, Rewriter

S = TypeVar("S")


class ProductRule(SourceRule[S], ABC):
    """Replaces a library product by a dequantize of its operands and a float product.

    Libraries scale integer sums, or multiply weights that are rounded in another place, so the
    results are equal up to rounding.
    """

    exactness = Exactness.ROUNDING


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A weight that is unpacked at compile time.

    Attributes:
        home: The constant that holds the packed weight.
        value: The unpacked values.
    """

    home: Node
    value: torch.Tensor


@dataclass(frozen=True, slots=True)
class Encoding:
    """Quantized values and their parameters.

    Attributes:
        values: The quantized values.
        scale: Their scale.
        zero_point: Their zero point or float offset, if any.
        spec: The rest of the encoding.
    """

    values: Node | Unpacked
    scale: Recipe
    zero_point: Recipe | None
    spec: QuantSpec

    def dequantize(self, rw: Rewriter, name: str) -> Node:
        """Add the dequantize; ``name`` names new constants."""
        q = self.values
        if isinstance(q, Unpacked):
            q = derived(rw, q.home, q.value, "unpacked")
        scale = self.scale.build(rw, f"{name}_scale")
        zero = None
        if self.zero_point is not None:
            zero = self.zero_point.build(rw, f"{name}_zero_point")
        return rw.call(ops.dequantize, q, scale, zero, str(self.spec))


@dataclass(frozen=True, slots=True)
class Fixed:
    """A parameter whose value is known.

    Attributes:
        value: One entry per block, in the rank of the data.
    """

    value: torch.Tensor

    def build(self, rw: Rewriter, hint: str) -> Node:
        """Add the constant."""
        return rw.constant(self.value, hint)


def check_dtype(node: Node, what: str, dtype: torch.dtype, known: tuple[torch.dtype, ...]) -> None:
    """Check that an operand has one of the dtypes that the op has kernels for.

    Raises:
        RefusedError: It has another dtype.
    """
    if dtype not in known:
        raise RefusedError(MissCode.DTYPE, node, "its {} is {}", what, dtype)


def constant_values(operand: Node, what: str) -> torch.Tensor:
    """Return the values of a constant operand; those that oneDNN packed, in their own shape.

    Raises:
        RefusedError: It is not a constant.
    """
    value = constant_of(operand)
    if value is None:
        # The graph may pack a constant weight in every call.
        value = evaluated(operand)
    if value is None or value.is_meta:
        raise RefusedError(MissCode.NOT_CONSTANT, operand, "its {} is not a constant", what)
    return dense_values(value)


def dense_values(value: torch.Tensor) -> torch.Tensor:
    """Return the values of a weight that oneDNN may have packed, exactly and in their own shape."""
    return value.to_dense() if value.layout is not torch.strided else value


def check_feature_bias(node: Node, bias: Node | None, features: int | torch.SymInt) -> None:
    """Check that a bias has one float per output feature.

    Raises:
        RefusedError: It has another shape or dtype.
    """
    if bias is None:
        return
    shape = shape_of(bias)
    if len(shape) != 1 or not same_size(shape[0], features):
        text = "its bias of shape {} is not one number per output feature"
        raise RefusedError(MissCode.SHAPE, node, text, tuple(shape))
    if not dtype_of(bias).is_floating_point:
        raise RefusedError(MissCode.DTYPE, node, "its bias is {}", dtype_of(bias))
