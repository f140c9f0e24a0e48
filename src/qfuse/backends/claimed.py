"""Run a graph op by op, with the functions of backends for the nodes that they claimed."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import GraphModule, Node

from qfuse.backends.eager import EagerRunner, run_eagerly
from qfuse.ir.graph.stage_graph import CLAIM_META, LoweredGraph


class Implements(Protocol):
    """The part of a backend that this file uses."""

    @property
    def name(self) -> str:
        """The name in the report."""

    def implement(self, node: Node) -> Callable[..., Any]:
        """Return the function that computes a claimed node."""


@dataclass(frozen=True, slots=True)
class ClaimedRunner:
    """An :class:`EagerRunner` under the name of the backends; see :class:`Runner`.

    Attributes:
        backend: The names of the backends.
        inner: Runs the graph.
    """

    backend: str
    inner: EagerRunner

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run the graph, apply its mutations, and return the user outputs."""
        return self.inner.run(inputs)

    def written(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what a run with ``inputs`` writes."""
        return self.inner.written(inputs)

    def fork(self) -> ClaimedRunner:
        """Return a runner with its own copy of the state, and the same constants."""
        return ClaimedRunner(self.backend, self.inner.fork())


def run_claimed(lowered: LoweredGraph, backends: Sequence[Implements]) -> ClaimedRunner:
    """Return a runner of ``lowered``, which is not changed."""
    twin = copy.deepcopy(lowered.graph)
    by_name = {backend.name: backend for backend in backends}
    pairs = zip(lowered.graph.nodes, twin.nodes, strict=True)
    for node, copied in pairs:
        claim = node.meta.get(CLAIM_META)
        # The items of a claimed node are taken from what its function returns.
        if claim is not None and node.target is not operator.getitem:
            copied.target = _named(by_name[claim].implement(node), node.name)
    module = GraphModule(lowered.module, twin)
    runner = run_eagerly(LoweredGraph(module, lowered.signature, lowered.log))
    return ClaimedRunner(", ".join(by_name), runner)


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap a function, which may be any callable, for the generated code of a graph module."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__name__ = f"claimed_{name}"
    return call
