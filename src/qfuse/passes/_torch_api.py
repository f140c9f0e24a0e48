"""Fake tensors and codegen of FX graphs: this package's only file with private torch API."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def new_mode() -> FakeTensorMode:
    """Return a new ``FakeTensorMode``."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=False)


def is_fake(value: object) -> bool:
    """Whether ``value`` is a fake tensor."""
    return isinstance(value, FakeTensor)


def mode_of(value: object) -> Any:
    """Return the ``FakeTensorMode`` of a fake tensor, ``None`` for other values."""
    return value.fake_mode if isinstance(value, FakeTensor) else None


def is_symbolic(value: torch.Tensor) -> bool:
    """Whether a fake tensor has symbolic sizes or strides."""
    return not all(isinstance(size, int) for size in (*value.shape, *value.stride()))


def is_guards(module: object) -> bool:
    """Whether a module holds the input guards that torch.export inserts."""
    # Importing the class would import torch._dynamo; without that module there are no instances.
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("torch.export._unlift", "GuardsFn")


def called_kind(target: object) -> str:
    """Describe a call of ``target`` that is not a single op of torch."""
    if isinstance(target, HigherOrderOperator):
        return "contains a subgraph"
    if isinstance(target, OpOverloadPacket):
        return "is not an overload of an op"
    return ""


def empty_like(graph: Graph) -> Graph:
    """Return an empty graph with the codegen of ``graph``."""
    new = Graph(tracer_cls=graph._tracer_cls, tracer_extras=graph._tracer_extras)
    new.set_codegen(graph._codegen)
    return new
