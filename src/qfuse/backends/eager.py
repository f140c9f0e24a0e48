"""Run a graph op by op: for machines without a compiler, and as a reference."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import torch
from torch.fx import GraphModule

from qfuse.ir.graph.buffers import set_buffer, with_graph
from qfuse.ir.graph.memory import address_of, write_values
from qfuse.ir.graph.stage_graph import LoweredGraph, Mutation


@dataclass(frozen=True, slots=True)
class EagerRunner:
    """Interprets the graph, and applies its mutations at the end; thread-safe.

    Calls that write buffers of the graph take turns; others run at the same time.

    Attributes:
        module: The lowered graph.
        order: Index of the flat input of each placeholder.
        mutations: The mutations of the source program.
        fed: Index of the flat input of each leaf of the signature, or ``None``.
        turn: Lock held by a call that writes a buffer, from the first read to the last write.
    """

    module: GraphModule
    order: tuple[int, ...]
    mutations: tuple[Mutation, ...]
    fed: tuple[int | None, ...]
    turn: Lock = field(default_factory=Lock, compare=False, repr=False)

    @property
    def backend(self) -> str:
        """Name of the backend."""
        return "eager"

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run the graph; see :meth:`qfuse.backends.Runner.run`."""
        if not self.mutations:
            return self._call(inputs)
        if all(m.buffer is None for m in self.mutations):
            return self._call_and_write(inputs)
        with self.turn:
            return self._call_and_write(inputs)

    def _call_and_write(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        values = self._call(inputs)
        # After the whole graph: it is functional, and its nodes read the values before the call.
        values = write_values(self.written(inputs), [m.output for m in self.mutations], values)
        return values[len(self.mutations) :]

    def _call(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return list(self.module(*[inputs[i] for i in self.order]))

    def written(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what a run writes; see :meth:`qfuse.backends.Runner.written`."""
        return [self._target(m, inputs) for m in self.mutations]

    def fork(self) -> EagerRunner:
        """Return a runner with its own copy of mutated tensors and of their aliases."""
        names = {m.buffer for m in self.mutations if m.buffer is not None}
        memory = {address_of(self.module.get_buffer(name)) for name in names}
        own = {
            n: b
            for n, b in self.module.named_buffers(remove_duplicate=False)
            if address_of(b) in memory
        }
        module = with_graph(self.module, copy.deepcopy(self.module.graph), names)
        # One ``deepcopy``, so that aliases stay aliases in the copy.
        for name, value in copy.deepcopy(own).items():
            set_buffer(module, name, value)
        return replace(self, module=module, turn=Lock())

    def _target(self, mutation: Mutation, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        if mutation.input_index is not None:
            position = self.fed[mutation.input_index]
            assert position is not None, "a constant leaf is not written"
            return inputs[position]
        return self.module.get_buffer(str(mutation.buffer))


def run_eagerly(lowered: LoweredGraph) -> EagerRunner:
    """Return a runner of ``lowered`` without compiling it."""
    names = [str(n.target) for n in lowered.graph.find_nodes(op="placeholder")]
    leaves = lowered.signature.inputs
    feeds = [leaf.placeholder for leaf in leaves if leaf.placeholder is not None]
    fed = tuple(
        None if leaf.placeholder is None else feeds.index(leaf.placeholder) for leaf in leaves
    )
    order = tuple(feeds.index(name) for name in names)
    return EagerRunner(lowered.module, order, lowered.signature.mutations, fed)
