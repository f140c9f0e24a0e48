"""Ops that only move elements, and how quantization parameters propagate through them.

The parameters of a tensor represent a tensor of the data's shape, one value per element. A movement
moves both alike. It is legal for the parameters exactly if the moved ones are again constant on the
blocks of a regular grid whose blocks are the original ones; :meth:`Movement.forward` returns that
grid for the result of the movement, :meth:`Movement.backward` the one for its source.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import torch
from torch.fx import Node

from qfuse.ir.aten import aten
from qfuse.ir.ops.views import shape_of
from qfuse.ir.quant.block import block_text
from qfuse.ir.quant.spec import Block
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import Size


class Mover(Protocol):
    """Applies ops to parameters, which are nodes of a graph or tensors."""

    def call(self, op: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply an op."""

    def sizes(self, node: Node) -> list[Any]:
        """Return the sizes of a node's value, as arguments of an op."""

    def at_run_time(self, value: Any) -> Any:
        """Return a value that keeps the ops applied to it from being constant-folded."""


class TensorMover:
    """Applies ops to tensors eagerly."""

    def call(self, op: Any, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Apply an op."""
        return op(value, *args, **kwargs)

    def sizes(self, node: Node) -> list[Any]:
        """Return the sizes."""
        return list(shape_of(node))

    def at_run_time(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value, since ops on tensors are eager."""
        return value


Apply: TypeAlias = Callable[[Mover, Any], Any]


@dataclass(frozen=True, slots=True)
class Moved:
    """Parameters after a movement.

    Attributes:
        block: The new block.
        apply: Moves a scale or a zero point.
        outer: The new block of the second level of scales, if there is one.
    """

    block: Block
    apply: Apply
    outer: Moved | None = None


@dataclass(frozen=True, slots=True)
class Movement(ABC):
    """One data movement op.

    Attributes:
        node: The op.
        source: The operand that it moves.
    """

    node: Node
    source: Node

    bijective = False
    """Whether it is a bijection: it neither drops nor repeats elements."""

    @property
    def before(self) -> Sequence[Size]:
        """Shape of the source."""
        return shape_of(self.source)

    @property
    def after(self) -> Sequence[Size]:
        """Shape of the result."""
        return shape_of(self.node)

    @abstractmethod
    def forward(self, block: Block) -> Moved | Refusal:
        """Propagate parameters from the source to the result."""

    @abstractmethod
    def backward(self, block: Block) -> Moved | Refusal:
        """Propagate parameters from the result to the source."""

    @abstractmethod
    def apply(self, mover: Mover, value: Any) -> Any:
        """Apply the same movement to another value of the source's shape."""


def move_levels(
    move: Callable[[Block], Moved | Refusal], block: Block, outer: Block | None
) -> Moved | Refusal:
    """Propagate parameters with an optional second level of scales; both levels must move.

    Args:
        move: :meth:`Movement.forward` or :meth:`Movement.backward`.
        block: The block of the parameters.
        outer: The block of their second level of scales.
    """
    moved = move(block)
    if outer is None or isinstance(moved, Refusal):
        return moved
    # An element's scale is the product of both levels, so one that stays behind would be multiplied
    # with the scales of other elements.
    second = move(outer)
    if isinstance(second, Refusal):
        return Refusal(
            f"their second level of scales, in blocks of {block_text(outer)}: {second.reason}"
        )
    return replace(moved, outer=second)


def keep(mover: Mover, value: Any) -> Any:
    """Return parameters unchanged."""
    del mover
    return value


def unsqueeze(mover: Mover, value: Any, axes: Sequence[int]) -> Any:
    """Add axes of size 1; ``axes`` are positions in the result."""
    for axis in axes:
        value = mover.call(aten.unsqueeze.default, value, axis)
    return value


def squeezed(block: Block, axes: Sequence[int]) -> Moved:
    """Remove axes with one block from a grid."""
    left = tuple(b for axis, b in enumerate(block) if axis not in axes)

    def apply(mover: Mover, value: Any) -> Any:
        return mover.call(aten.squeeze.dims, value, list(axes)) if axes else value

    return Moved(left, apply)


def with_axis(block: Block, axis: int, b: int | None) -> Block:
    """Return the block with a different size along one axis."""
    return (*block[:axis], b, *block[axis + 1 :])
