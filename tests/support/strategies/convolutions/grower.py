"""A random graph of images under construction: the layouts, dtypes and sizes of its values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from tests.support.strategies.grower import Grower, Value, hint, text_of
from torch.fx import Node

from qfuse.ir.ops.views import shape_of

aten = torch.ops.aten


@dataclass
class ImageGrower(Grower):
    """Grows a graph of images: float tensors with channels and a few spatial axes.

    Attributes:
        rank: Number of spatial axes.
        batched: Whether there is an axis before the channels.
        quantized_values: Those that may leave the graph as they are.
    """

    rank: int = 2
    batched: bool = True
    quantized_values: list[Node] = field(default_factory=list)

    @property
    def channel_axis(self) -> int:
        """The axis of the channels."""
        return 1 if self.batched else 0

    def input(self, shape: Sequence[int | str], dtype: torch.dtype) -> Value:
        """Add an image as an input of the graph: contiguous, channels-last, or in another order."""
        axes = list(range(len(shape)))
        order = None
        if self.chance(3) and self.batched:
            order = [0, *axes[2:], 1]
        elif self.chance(12):
            order = axes[::-1]
        return self.add(self.arg("x", dtype, shape, order), coarse=True)

    def channels(self, node: Node) -> int:
        """The number of channels of an image."""
        return int(shape_of(node)[self.channel_axis])

    def spatial(self, node: Node) -> list[int]:
        """The spatial sizes of an image in the trace."""
        return [hint(size) for size in shape_of(node)[self.channel_axis + 1 :]]

    def scattered(self, node: Node) -> bool:
        """Whether the positions of one channel are not next to each other, as in channels-last."""
        step = node.meta["val"].stride(self.channel_axis)
        return hint(step) != prod(self.spatial(node))

    def is_image(self, value: Value) -> bool:
        """Whether a value is a float tensor with all axes and a known number of channels."""
        sizes = shape_of(value.node)
        if not self.is_float(value) or len(sizes) != self.channel_axis + 1 + self.rank:
            return False
        return isinstance(sizes[self.channel_axis], int) and self.elements(value.node) > 0

    def image(self, fits: Callable[[Value], bool] = lambda _: True) -> Value | None:
        """Choose an image that fits, the newest one most of the time."""
        return self.value(lambda v: self.is_image(v) and fits(v))

    def alike(self, node: Node, *, channels: bool = True) -> list[Value]:
        """The images of the same sizes, newest first; those of the channels may not matter."""
        axis = self.channel_axis

        def key(other: Node) -> tuple[str, ...]:
            sizes = text_of(shape_of(other))
            return sizes if channels else (*sizes[:axis], *sizes[axis + 1 :])

        known = [v for v in self.values if self.is_image(v)]
        return [v for v in reversed(known) if key(v.node) == key(node)]
