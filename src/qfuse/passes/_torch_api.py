"""Fake tensors and codegens of graphs that others made: this room's only file on private API."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def new_mode() -> FakeTensorMode:
    """Return a fresh mode for fake tensors."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=False)


def is_fake(value: object) -> bool:
    """Whether ``value`` is a fake tensor."""
    return isinstance(value, FakeTensor)


def mode_of(value: object) -> Any:
    """Return the mode that a fake tensor lives in, ``None`` for anything else."""
    return value.fake_mode if isinstance(value, FakeTensor) else None


def is_symbolic(value: torch.Tensor) -> bool:
    """Whether a size or a stride of a fake tensor varies."""
    return not all(isinstance(size, int) for size in (*value.shape, *value.stride()))


def is_guards(module: object) -> bool:
    """Whether a module is what torch.export puts in to check the sizes of inputs."""
    # Its module imports torch._dynamo, and where it was not imported there is no such object.
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("torch.export._unlift", "GuardsFn")


def called_kind(target: object) -> str:
    """Say what kind of call has ``target``, if it is one that names no single op of torch."""
    if isinstance(target, HigherOrderOperator):
        return "keeps a graph of its own inside"
    if isinstance(target, OpOverloadPacket):
        return "names no overload of its op"
    return ""


def empty_like(graph: Graph) -> Graph:
    """Return a graph without nodes that is called, traced and printed like ``graph``."""
    new = Graph(tracer_cls=graph._tracer_cls, tracer_extras=graph._tracer_extras)
    new.set_codegen(graph._codegen)
    return new
