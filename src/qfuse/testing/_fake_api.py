"""Fake tensors for hand-built graphs: this package's only file with private torch API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.value_ranges import ValueRanges


def new_fake_mode() -> FakeTensorMode:
    """Return a new ``FakeTensorMode`` with symbolic sizes enabled."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=False)
    # A small graph never repeats an op on the same symbols: filling the cache is a third of the
    # time that its tests take.
    mode.cache_enabled = False
    return mode


@contextmanager
def tracing(mode: FakeTensorMode) -> Iterator[None]:
    """Run a block in which ops compute fake tensors as in a capture.

    Some ops have a decomposition in Python for symbolic sizes; the one in C++ takes the sizes of
    the trace for fixed ones.
    """
    with enable_python_dispatcher(), mode:
        yield


def declare_range(size: torch.SymInt, low: int, high: int) -> None:
    """Set the range of a symbolic size; by default torch assumes two or more."""
    size.node.shape_env.var_to_range[size.node.expr] = ValueRanges(low, high)
