"""The float types in an op with an epilogue."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch.fx import Node

from qfuse.ir.ops.epilogue import Epilogue, Mul, Round
from qfuse.ir.ops.views import QuantParams, dtype_of, tensor_of


class Stepped(Protocol):
    """An op whose epilogue takes what it computes from ``x``."""

    @property
    def x(self) -> Node:
        """Its first operand."""
        ...

    @property
    def x_params(self) -> QuantParams | None:
        """How that is quantized."""
        ...

    @property
    def epilogue(self) -> Epilogue:
        """The steps."""
        ...

    @property
    def extras(self) -> tuple[Node, ...]:
        """The operands of the steps."""
        ...


def first_type(op: Stepped) -> torch.dtype:
    """Return the float type that the epilogue begins with."""
    return dtype_of(op.x) if op.x_params is None else op.x_params.spec.real


def float_types(op: Stepped) -> tuple[torch.dtype, ...]:
    """Return the float type in front of every step, and the one behind the last."""
    return op.epilogue.real_types(first_type(op), [tensor_of(extra) for extra in op.extras])


def rounding_problems(op: Stepped) -> Iterator[str]:
    """Check that what is rounded on the way has the type that the specs say."""
    for step, real in zip(op.epilogue.steps, float_types(op), strict=False):
        if isinstance(step, Round):
            found, spec = real, step.spec
        elif isinstance(step, Mul) and step.rounded is not None:
            found, spec = dtype_of(op.extras[step.index]), step.rounded.spec
        else:
            continue
        if found != spec.real:
            yield f"real numbers are {found}, the spec says {spec}"
