"""Fake tensors for hand-built graphs. The only file of this room on torch's private API."""

from __future__ import annotations

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = ["new_fake_mode"]


def new_fake_mode() -> FakeTensorMode:
    """Return a fresh mode with symbolic sizes enabled."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=False)
