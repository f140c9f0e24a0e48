"""A random graph of sequences under construction: float tensors whose last axis are features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from tests.support.strategies.grower import MOST_ELEMENTS, Grower, Value, text_of
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.node import Argument

from qfuse.ir.ops.views import shape_of

MOST_AXES = 4


@dataclass
class SequenceGrower(Grower):
    """Grows a graph of sequences.

    Attributes:
        results: Tensors that may leave the graph besides the float ones: quantized values, ids.
    """

    results: list[Node] = field(default_factory=list)

    def call(self, op: OpOverload, *args: Argument, **kwargs: Argument) -> Node:
        """Add a call."""
        return self.b.call(op, *args, **kwargs)

    def call_like(self, like: Node, op: OpOverload, *args: Argument) -> Node:
        """Add a call that gives what ``like`` is, by an op without a fake version."""
        node = self.b.graph.call_function(op, args)
        node.meta["val"] = like.meta["val"].new_empty(like.meta["val"].shape)
        return node

    def is_sequence(self, value: Value) -> bool:
        """Whether a value is a float tensor with a known number of features, and not too large."""
        sizes = shape_of(value.node)
        if not self.is_float(value) or not 1 <= len(sizes) <= MOST_AXES:
            return False
        known = isinstance(sizes[-1], int) and sizes[-1] > 0
        return known and 0 < self.elements(value.node) <= MOST_ELEMENTS

    def sequence(self, fits: Callable[[Value], bool] = lambda _: True) -> Value | None:
        """Choose a sequence that fits, the newest one most of the time."""
        return self.value(lambda v: self.is_sequence(v) and fits(v))

    def features(self, value: Value) -> int:
        """The size of the last axis."""
        return int(shape_of(value.node)[-1])

    def rank(self, value: Value) -> int:
        """The number of axes."""
        return len(shape_of(value.node))

    def alike(self, value: Value) -> list[Value]:
        """The sequences of the same sizes and type, newest first."""
        key = text_of(self.sizes(value)), self.real(value)
        known = [v for v in self.values if self.is_sequence(v)]
        return [v for v in reversed(known) if (text_of(self.sizes(v)), self.real(v)) == key]

    def vector(self, size: int, dtype: torch.dtype, stem: str = "c") -> Node:
        """Add a constant of one number per feature."""
        return self.b.const(self.name(stem), self.numbers((size,), dtype))
