"""Find connected regions around quantized convolutions that could be channels-last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.fx import Node

from qfuse.ir.graph.schema import is_call
from qfuse.ir.memory_formats import channels_last_of, has_fastest_channels
from qfuse.ir.ops.convolution import FusedConvolution, as_fused_convolution
from qfuse.ir.sizes import is_row_major, same_size
from qfuse.lower.layout.shuffles import Shuffle
from qfuse.rewrite.regions import Infer, Region, RegionSearch

aten = torch.ops.aten

# They keep a position in the dtype of the values, which may be too narrow for it.
_POOLS_WITH_INDICES = (aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)


class ChannelsLastSearch(RegionSearch):
    """Finds the regions that start at quantized convolutions.

    Args:
        infer: Returns fake results.
        shuffles: The channel shuffles by their last nodes.
    """

    def __init__(self, infer: Infer, shuffles: Mapping[Node, Shuffle]) -> None:
        super().__init__(infer)
        self._shuffles = shuffles
        # The ops inside of shuffles, with the last one.
        self._inside = {node: s.node for s in shuffles.values() for node in s.between}

    def starts(self, node: Node) -> bool:
        """Whether a kernel may compute a convolution, which reads channels-last pixels in place."""
        fused = as_fused_convolution(node)
        return fused is not None and _is_quantized(fused)

    def format(self, rank: int) -> torch.memory_format | None:
        """Return the channels-last format for tensors of ``rank`` axes, if there is one."""
        return channels_last_of(rank)

    def enters(self, value: torch.Tensor) -> bool:
        """Whether an image is row-major."""
        return not _is_either(value)

    def changes(self, before: torch.Tensor, after: torch.Tensor) -> bool:
        """Whether a result is a channels-last image."""
        del before
        return _is_channels_last(after)

    def operands(self, node: Node) -> Sequence[Node]:
        """Return the operands of a node; a channel shuffle has its image."""
        shuffle = self._shuffles.get(node)
        return super().operands(node) if shuffle is None else [shuffle.source]

    def is_in_region(self, node: Node) -> bool:
        """Whether ``node`` is made again, or is inside of a channel shuffle that is."""
        inside = self._inside.get(node)
        return super().is_in_region(node) or (inside is not None and super().is_in_region(inside))

    def visit(self, node: Node) -> None:
        """Add ``node`` if its result is channels-last when its operands are."""
        if node in self._shuffles:
            self._visit_shuffle(node)
        elif not _keeps_narrow_positions(node):
            super().visit(node)

    def _visit_shuffle(self, node: Node) -> None:
        """Add a channel shuffle of a channels-last image."""
        shape = node.meta["val"]
        if channels_last_of(shape.dim()) is not None:
            value = self.arranged(shape)
            if _is_channels_last(value):
                self.add(node, value, [])


def copies_of_convolutions(region: Region) -> list[Node]:
    """Return the values that convolutions copy if the region is not channels-last."""
    copies: list[Node] = []
    for node in region.nodes:
        fused = as_fused_convolution(node)
        if fused is not None:
            large = [e for e in fused.extras if e in region.nodes or e in region.entries[node]]
            copies += [fused.x, *large, node]
    return copies


def _is_quantized(fused: FusedConvolution) -> bool:
    weight = fused.weight_params
    return fused.x_params is not None or (
        weight is not None and not weight.spec.dtype.is_floating_point
    )


def _keeps_narrow_positions(node: Node) -> bool:
    """Whether a channels-last pool would count pixels in 8 bits."""
    if not is_call(node, *_POOLS_WITH_INDICES):
        return False
    return bool(node.meta["val"][0].dtype.itemsize == 1)


def _is_channels_last(value: torch.Tensor) -> bool:
    return has_fastest_channels(value) and not is_row_major(value)


def _is_either(value: torch.Tensor) -> bool:
    """Whether the pixels need no copy: channels are adjacent, or there is a single pixel."""
    if not has_fastest_channels(value):
        return False
    one_channel = same_size(value.shape[1], 1)
    return not one_channel or all(same_size(size, 1) for size in value.shape[2:])
