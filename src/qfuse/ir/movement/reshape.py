"""Movements that keep every element: reshapes, permutations and expansions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from qfuse.ir.aten import aten
from qfuse.ir.graph.schema import arguments, is_call
from qfuse.ir.movement.base import Moved, Movement, Mover, keep, squeezed, unsqueeze
from qfuse.ir.quant.block import covers, fill_ones, view_block
from qfuse.ir.quant.spec import Block
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import Size, inverse, same_size


class Copy(Movement):
    """``clone``, ``contiguous``, ``alias``: the same elements in the same shape."""

    bijective = True

    def forward(self, block: Block) -> Moved:
        """Keep everything."""
        return Moved(block, keep)

    def backward(self, block: Block) -> Moved:
        """Keep everything."""
        return Moved(block, keep)

    def apply(self, mover: Mover, value: Any) -> Any:
        """Copy in the same memory format."""
        if is_call(self.node, aten.alias.default):
            return value
        memory_format = arguments(self.node).get("memory_format")
        if memory_format is None:
            return mover.call(aten.clone.default, value)
        return mover.call(aten.clone.default, value, memory_format=memory_format)


class View(Movement):
    """``view``, ``reshape``, ``flatten``: the same elements in row-major order."""

    bijective = True

    def forward(self, block: Block) -> Moved | Refusal:
        """View the grid in the block shape of the result."""
        moved = view_block(block, self.before, self.after)
        if isinstance(moved, Refusal):
            return moved
        return _viewed(moved, self.after, self._sizes)

    def backward(self, block: Block) -> Moved | Refusal:
        """View the grid in the block shape of the source."""
        moved = view_block(block, self.after, self.before)
        if isinstance(moved, Refusal):
            return moved
        return _viewed(moved, self.before, lambda mover: mover.sizes(self.source))

    def apply(self, mover: Mover, value: Any) -> Any:
        """Reshape to the same sizes; a copy may be needed, since strides may differ."""
        return mover.call(aten.reshape.default, value, self._sizes(mover))

    def _sizes(self, mover: Mover) -> list[Any]:
        a = arguments(self.node)
        sizes = a["shape"] if "shape" in a else a["size"]
        assert isinstance(sizes, (list, tuple)), f"not a list of sizes: {self.node.format_node()}"
        if any(isinstance(s, Node) for s in sizes):
            return list(sizes)
        known = [s for s in self.after if isinstance(s, int)]
        return known if len(known) == len(self.after) else list(sizes) or mover.sizes(self.node)


def _viewed(
    block: Block, shape: Sequence[Size], sizes: Callable[[Mover], list[Any]]
) -> Moved | Refusal:
    """View parameters in the shape of the grid of ``block`` over ``shape``."""
    unknown = [
        axis
        for axis, (b, size) in enumerate(zip(block, shape, strict=True))
        # The grid of such an axis has `size / b` entries, which has to be a number in the call.
        if b not in {None, 1} and not isinstance(size, int)
    ]
    if unknown:
        return Refusal("the number of blocks along an axis is not known")

    def apply(mover: Mover, value: Any) -> Any:
        # Sizes may cost nodes, and only axes with an entry per index need theirs.
        full = sizes(mover) if any(b == 1 for b in block) else [1] * len(block)
        grid = [
            1 if b is None else s if b == 1 else -(-int(size) // b)
            for b, s, size in zip(block, full, shape, strict=True)
        ]
        return mover.call(aten.reshape.default, value, grid)

    return Moved(block, apply)


@dataclass(frozen=True, slots=True)
class Permute(Movement):
    """``permute``, ``transpose``, ``t``.

    Attributes:
        dims: For every axis of the result, the axis of the source.
    """

    dims: tuple[int, ...]

    bijective = True

    def forward(self, block: Block) -> Moved:
        """Permute the axes."""
        return _permuted(block, self.dims)

    def backward(self, block: Block) -> Moved:
        """Permute them back."""
        return _permuted(block, inverse(self.dims))

    def apply(self, mover: Mover, value: Any) -> Any:
        """Permute another value."""
        return mover.call(aten.permute.default, value, list(self.dims))


def _permuted(block: Block, dims: Sequence[int]) -> Moved:
    return Moved(
        tuple(block[axis] for axis in dims),
        lambda mover, value: mover.call(aten.permute.default, value, list(dims)),
    )


@dataclass(frozen=True, slots=True)
class Unsqueeze(Movement):
    """Adds axes of size 1.

    Attributes:
        axes: The new axes, in the result, ascending.
    """

    axes: tuple[int, ...]

    bijective = True

    def forward(self, block: Block) -> Moved:
        """Add the axes to the grid."""
        return _unsqueezed(block, self.axes)

    def backward(self, block: Block) -> Moved:
        """Remove them from the grid."""
        return squeezed(block, self.axes)

    def apply(self, mover: Mover, value: Any) -> Any:
        """Add the axes."""
        return unsqueeze(mover, value, self.axes)


@dataclass(frozen=True, slots=True)
class Squeeze(Movement):
    """Drops axes of size 1.

    Attributes:
        axes: The removed axes, in the source, ascending.
    """

    axes: tuple[int, ...]

    bijective = True

    def forward(self, block: Block) -> Moved:
        """Remove the axes from the grid."""
        return squeezed(block, self.axes)

    def backward(self, block: Block) -> Moved:
        """Add them to the grid."""
        return _unsqueezed(block, self.axes)

    def apply(self, mover: Mover, value: Any) -> Any:
        """Drop the axes."""
        return mover.call(aten.squeeze.dims, value, list(self.axes)) if self.axes else value


def _unsqueezed(block: Block, axes: Sequence[int]) -> Moved:
    grown: list[int | None] = list(block)
    for axis in axes:
        grown.insert(axis, None)
    filled = fill_ones(grown, [axis in axes for axis in range(len(grown))])
    return Moved(filled, lambda mover, value: unsqueeze(mover, value, axes))


class Expand(Movement):
    """``expand``: axes of size 1 are repeated without a copy; new axes come first."""

    def forward(self, block: Block) -> Moved:
        """Use one block for repeated axes, which have one entry in the grid."""
        fresh = len(self.after) - len(self.before)
        # A repeated axis has size 1 in the source, so its grid has one entry, valid for all copies.
        grown: Block = (None,) * fresh + tuple(
            b if same_size(old, new) else None
            for b, old, new in zip(block, self.before, self.after[fresh:], strict=True)
        )
        return Moved(grown, lambda mover, value: unsqueeze(mover, value, range(fresh)))

    def backward(self, block: Block) -> Moved | Refusal:
        """Accept parameters that are the same for all copies."""
        fresh = len(self.after) - len(self.before)
        repeated = [
            axis < fresh or not same_size(self.before[axis - fresh], size)
            for axis, size in enumerate(self.after)
        ]
        for b, size, many in zip(block, self.after, repeated, strict=True):
            if many and not covers(b, size):
                return Refusal("copies of one element have different scales")
        left = fill_ones(block[fresh:], repeated[fresh:])
        return Moved(left, squeezed(block, tuple(range(fresh))).apply)

    def apply(self, mover: Mover, value: Any) -> Any:
        """Expand to the same sizes."""
        return mover.call(aten.expand.default, value, arguments(self.node)["size"])
