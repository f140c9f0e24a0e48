"""A model as a pure function, for runtimes without mutable buffers."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from qfuse.zoo import ZooModel

_STATE = ("keys_", "values_")


class _Functional(nn.Module):
    """Passes mutable buffers as inputs after the inputs, and returns them after the result."""

    def __init__(self, inner: nn.Module, names: tuple[str, ...], order: tuple[str, ...]) -> None:
        super().__init__()
        self.inner = inner
        self.names = names
        self.order = order

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call the module on inputs and state; return its results and the new state."""
        count = len(values) - len(self.names)
        # Cloned, since the module mutates them and they belong to the caller.
        state = dict(zip(self.names, (v.clone() for v in values[count:]), strict=True))
        inputs = dict(zip(self.order, values[:count], strict=True))
        result = torch.func.functional_call(self.inner, state, (), inputs)
        return (*_tensors(result), *state.values())


def _tensors(result: object) -> list[torch.Tensor]:
    """Return the tensors of a result, whatever containers they are in."""
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True, slots=True)
class Function:
    """A model of the zoo without state of its own.

    Attributes:
        module: Maps inputs and state to all results and the new state.
        inputs: Example inputs, in the order in which the module takes them.
        state: Initial values of the buffers; empty for most models.
        names: Names of the inputs.
        results: How many tensors a call returns besides the state.
    """

    module: nn.Module
    inputs: tuple[torch.Tensor, ...]
    state: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    results: int

    def flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Return the inputs of a call in the order in which the module takes them."""
        given = dict(zip(self.names, args, strict=False)) | kwargs
        return [given[name] for name in self.names]

    def export(self) -> torch.export.ExportedProgram:
        """Export it for these sizes."""
        with torch.no_grad():
            return torch.export.export(self.module, (*self.inputs, *self.state), strict=False)


def function_of(model: ZooModel) -> Function:
    """Return a model without state; its only state must be mutable caches."""
    names = tuple(n for n, _ in model.module.named_buffers() if n.startswith(_STATE))
    known = tuple(inspect.signature(model.module.forward).parameters)
    given = dict(zip(known, model.args, strict=False)) | model.kwargs
    order = tuple(name for name in known if name in given)
    state = tuple(model.module.get_buffer(name).clone() for name in names)
    module = _Functional(model.module, names, order).eval()
    inputs = tuple(given[name] for name in order)
    with torch.no_grad():
        results = len(module(*inputs, *state)) - len(state)
    return Function(module, inputs, state, order, results)
