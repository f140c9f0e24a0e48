"""Run a graph op by op: for machines without a compiler, and to compare with."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qfuse.ir.program import LoweredGraph, Mutation

__all__ = ["EagerRunner", "run_eagerly"]


@dataclass(frozen=True, slots=True)
class EagerRunner:
    """The graph itself, with its writes done after it. May be called from several threads.

    Attributes:
        module: The lowered graph.
        order: For each placeholder the flat input that feeds it.
        mutations: The writes of the source program.
        fed: For each leaf of the signature its place among the flat inputs, or ``None``.
    """

    module: GraphModule
    order: tuple[int, ...]
    mutations: tuple[Mutation, ...]
    fed: tuple[int | None, ...]

    @property
    def backend(self) -> str:
        """Name of the backend."""
        return "eager"

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run the graph; see :meth:`qfuse.backends.Runner.run`."""
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            values: list[Any] = list(self.module(*[inputs[i] for i in self.order]))
            if self.mutations:
                self._write(values, inputs)
        return values[len(self.mutations) :]

    def fork(self) -> EagerRunner:
        """A runner with its own copy of what is written, and of what shares memory with it."""
        names = {m.buffer for m in self.mutations if m.buffer is not None}
        memory = {_memory(self.module.get_buffer(name)) for name in names}
        own = {
            n: b
            for n, b in self.module.named_buffers(remove_duplicate=False)
            if _memory(b) in memory
        }
        module = GraphModule(self.module, copy.deepcopy(self.module.graph))
        # In one go, so that views of one memory become views of one copy.
        for name, value in copy.deepcopy(own).items():
            owner, _, attribute = name.rpartition(".")
            module.get_submodule(owner).register_buffer(attribute, value)
        return replace(self, module=module)

    def _write(self, values: list[Any], inputs: Sequence[torch.Tensor]) -> None:
        targets = [self._target(m, inputs) for m in self.mutations]
        memory = {_memory(t) for t in targets}
        # A value that is a view of what is written now would change on the way.
        for i, value in enumerate(values):
            if isinstance(value, torch.Tensor) and _memory(value) in memory:
                values[i] = value.clone()
        for target, mutation in zip(targets, self.mutations, strict=True):
            target.copy_(values[mutation.output])

    def _target(self, mutation: Mutation, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        if mutation.input_index is not None:
            position = self.fed[mutation.input_index]
            assert position is not None, "a constant leaf is not written"
            return inputs[position]
        return self.module.get_buffer(str(mutation.buffer))


def _memory(value: torch.Tensor) -> int:
    """Equal for tensors that are views of the same memory."""
    return value.untyped_storage().data_ptr()


def run_eagerly(lowered: LoweredGraph) -> EagerRunner:
    """Return a runner of ``lowered`` as it is."""
    names = [str(n.target) for n in lowered.graph.find_nodes(op="placeholder")]
    leaves = lowered.signature.inputs
    feeds = [leaf.placeholder for leaf in leaves if leaf.placeholder is not None]
    fed = tuple(
        None if leaf.placeholder is None else feeds.index(leaf.placeholder) for leaf in leaves
    )
    order = tuple(feeds.index(name) for name in names)
    return EagerRunner(lowered.module, order, lowered.signature.mutations, fed)
