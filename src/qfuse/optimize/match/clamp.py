"""Activations that cut off at two numbers, of which either may be infinite."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.fx.node import Argument

from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.ops.views import dtype_of, node_of
from qfuse.rewrite.prelude import Node, OpOverload, arguments, aten

CLAMPS: tuple[OpOverload, ...] = (
    aten.relu.default,
    aten.relu6.default,
    aten.hardtanh.default,
    aten.clamp.default,
    aten.clamp_min.default,
    aten.clamp_max.default,
)


@dataclass(frozen=True, slots=True)
class Clamp:
    """A clamp with bounds that are written in the graph.

    Attributes:
        node: The op.
        x: What is cut off.
        rest: The other arguments.
    """

    node: Node
    x: Node
    rest: tuple[Argument, ...]

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Cut tensors off as the op does, its rounding of bounds and its NaN included."""
        op = overload_of(self.node)
        assert op is not None, f"not a call of an op: {self.node.format_node()}"
        with torch.no_grad():
            cut: torch.Tensor = op(values, *self.rest)
        return cut


def as_clamp(value: object) -> Clamp | None:
    """View ``value`` as a clamp with known bounds that keeps the type, or ``None``."""
    if not is_call(value, *CLAMPS):
        return None
    node = node_of(value)  # type: ignore[arg-type]
    a = arguments(node)
    rest = tuple(v for name, v in a.items() if name != "self")
    x = node_of(a["self"])
    dtype = dtype_of(node)
    if not dtype.is_floating_point or dtype_of(x) != dtype:
        return None
    return Clamp(node, x, rest) if all(_is_bound(v, torch.finfo(dtype).max) for v in rest) else None


def _is_bound(value: Argument, most: float) -> bool:
    """Whether a type, of which ``most`` is the greatest finite number, has a bound, or none is."""
    if value is None:
        return True
    return isinstance(value, (int, float)) and (abs(value) <= most or math.isinf(value))
