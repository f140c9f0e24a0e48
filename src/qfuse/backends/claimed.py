"""Run a graph op by op, with the functions of backends for the nodes that they claimed."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import Node

from qfuse.backends.eager import EagerRunner, run_eagerly
from qfuse.ir.errors import BackendError
from qfuse.ir.foreign import call_foreign
from qfuse.ir.graph.buffers import with_graph
from qfuse.ir.graph.stage_graph import CLAIM_META, LoweredGraph, place_of


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
    """Return a runner of ``lowered``, which is not changed.

    Raises:
        BackendError: A backend does not implement a node that it claimed.
    """
    twin = copy.deepcopy(lowered.graph)
    by_name = {backend.name: backend for backend in backends}
    pairs = zip(lowered.graph.nodes, twin.nodes, strict=True)
    for node, copied in pairs:
        claim = node.meta.get(CLAIM_META)
        # The items of a claimed node are taken from what its function returns.
        if claim is not None and node.target is not operator.getitem:
            copied.target = _implementation(by_name[claim], node)
    written = [mutation.buffer for mutation in lowered.signature.mutations]
    module = with_graph(lowered.module, twin, written)
    runner = run_eagerly(LoweredGraph(module, lowered.signature, lowered.log))
    return ClaimedRunner(", ".join(by_name), runner)


def _implementation(backend: Implements, node: Node) -> Callable[..., Any]:
    """Wrap the function of a node, which may be any callable, for generated code."""
    what, where = f"implement of the backend {backend.name!r}", str(place_of(node))
    function = call_foreign(
        backend.implement,
        node,
        what=what,
        on=node.target,
        where=where,
        fix="repair the backend, or refuse the node in is_legal",
        kind=BackendError,
    )
    if not callable(function):
        raise BackendError(
            f"{what} returned {function!r} for {node.target}",
            where=where,
            fix="return the function that computes the node",
        )
    expected = _kind_of(node.meta["val"])

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if _kind_of(result) != expected:
            raise BackendError(
                f"the backend {backend.name!r} computed {_kind_of(result)} for {node.target}, "
                f"which returns {expected}",
                where=where,
                fix="return what the op returns from the function that implement gives",
            )
        return result

    call.__name__ = f"claimed_{node.name}"
    return call


def _kind_of(value: object) -> str:
    """Return what a result is: a tensor, a number, or several values."""
    if isinstance(value, torch.Tensor):
        return "a tensor"
    if isinstance(value, (tuple, list)):
        return f"{len(value)} values"
    # A size is symbolic in metadata.
    if isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return "a number"
    return f"an object of the type {type(value).__name__}"
