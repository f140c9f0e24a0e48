"""Fake tensors for hand-built graphs. The only file of this room on torch's private API."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.value_ranges import ValueRanges


def new_fake_mode() -> FakeTensorMode:
    """Return a fresh mode with symbolic sizes enabled."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=False)


def declare_range(size: torch.SymInt, low: int, high: int) -> None:
    """Say which values a symbolic size may take; by default torch assumes two or more."""
    size.node.shape_env.var_to_range[size.node.expr] = ValueRanges(low, high)
