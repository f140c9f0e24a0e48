"""Fake tensors for hand-built graphs: this package's only file with private torch API."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.value_ranges import ValueRanges


def new_fake_mode() -> FakeTensorMode:
    """Return a new ``FakeTensorMode`` with symbolic sizes enabled."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=False)


def declare_range(size: torch.SymInt, low: int, high: int) -> None:
    """Set the range of a symbolic size; by default torch assumes two or more."""
    size.node.shape_env.var_to_range[size.node.expr] = ValueRanges(low, high)
