"""Constant factors in a row behind a dequantize, with clamps between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from qfuse.ir.aten import aten
from qfuse.ir.graph.schema import arguments, is_call, overload_of
from qfuse.ir.ops.constants import constant_value, number_of
from qfuse.ir.ops.qdq import Dequantize, as_dequantize
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.sizes import same_shape
from qfuse.optimize.commute.clamp import Clamp
from qfuse.rewrite.pattern.base import is_tensor

# Bounds the search for the dequantize.
_STEPS = 8


@dataclass(frozen=True, slots=True)
class ConstantFactor:
    """A product with a constant, or a quotient by one.

    Attributes:
        node: The product or quotient.
        source: Its other operand.
        by: The constant as the op reads it.
        number: Its value in float64 and in the rank of the product.
    """

    node: Node
    source: Node
    by: torch.Tensor | float
    number: torch.Tensor

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Multiply or divide tensors as the op does."""
        op = overload_of(self.node)
        assert op is not None, "a product is a call"
        found: torch.Tensor = op(values, self.by)
        return found

    def scaled(self, scale: torch.Tensor) -> torch.Tensor:
        """Multiply or divide a scale in float64."""
        return scale / self.number if is_call(self.node, aten.div.Tensor) else scale * self.number


@dataclass(frozen=True, slots=True)
class FactorChain:
    """A dequantize and what multiplies and clamps its result.

    Attributes:
        dequantize: The dequantize.
        steps: Factors and clamps, in the order in which they are computed.
    """

    dequantize: Dequantize
    steps: tuple[ConstantFactor | Clamp, ...]

    @property
    def end(self) -> Node:
        """The last factor."""
        return self.steps[-1].node

    @property
    def factors(self) -> list[ConstantFactor]:
        """The steps that are not clamps."""
        return [step for step in self.steps if isinstance(step, ConstantFactor)]

    @property
    def is_clamped(self) -> bool:
        """Whether some of the steps are clamps."""
        return len(self.factors) < len(self.steps)

    @property
    def keeps_type(self) -> bool:
        """Whether all steps have the dtype and the shape of the dequantize."""
        shape, dtype = shape_of(self.dequantize.node), self.dequantize.params.spec.float_dtype
        nodes = [step.node for step in self.steps]
        return all(dtype_of(n) == dtype and same_shape(shape_of(n), shape) for n in nodes)

    def scaled(self, scale: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield a scale in float64 with the first factor, with the first two, and so on."""
        for step in self.factors:
            scale = step.scaled(scale)
            yield scale

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Compute what the steps make of dequantized values."""
        for step in self.steps:
            values = step(values)
        return values


def factor_chain(end: Node) -> FactorChain | None:
    """Return the chain whose last step is the product or quotient ``end``."""
    steps: list[ConstantFactor | Clamp] = []
    node = end
    while len(steps) < _STEPS:
        step = _factor(node) or (Clamp.of(node) if steps else None)
        if step is None:
            return None
        steps.append(step)
        node = step.source
        source = as_dequantize(node)
        if source is not None:
            return FactorChain(source, tuple(reversed(steps)))
    return None


def _factor(node: Node) -> ConstantFactor | None:
    """View a product with a constant, or a quotient by one."""
    if not is_call(node, aten.mul.Tensor, aten.div.Tensor):
        return None
    a = arguments(node)
    pairs = [(a["self"], a["other"]), (a["other"], a["self"])]
    for source, by in pairs if is_call(node, aten.mul.Tensor) else pairs[:1]:
        if is_tensor(source) and (value := _constant(by)) is not None:
            return _of_value(node, source, value)
    return None


def _of_value(node: Node, source: Node, value: torch.Tensor | float) -> ConstantFactor | None:
    number, rank = torch.as_tensor(value), len(shape_of(node))
    if number.dtype is torch.bool or number.is_complex() or number.dim() > rank:
        return None
    wide = dtype_of(source) is torch.float64
    number = number.to(torch.float64 if wide else torch.float32).double()
    ones = (1,) * (rank - number.dim())
    return ConstantFactor(node, source, value, number.reshape((*ones, *number.shape)))


def _constant(by: object) -> torch.Tensor | float | None:
    """Return the value of a constant operand, ``None`` for another one."""
    return constant_value(by) if isinstance(by, Node) else number_of(by)
