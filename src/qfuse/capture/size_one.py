"""Check whether the graph is valid for sizes of 1, which torch.export assumes.

Dynamic sizes are traced as if they were at least 2, so ``if x.shape[1] == 1`` is specialized
silently, and a range from 1 is accepted without a trace of size 1. Another trace, of a call with
sizes of 1, shows whether the model calls the same operators there. If it does not, and the results
differ too, the range is cut: a size of 1 is then refused instead of computed incorrectly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from qfuse.capture.training import is_random
from qfuse.ir.errors import CaptureError, InputError
from qfuse.ir.events import Exactness, Noted
from qfuse.ir.graph.schema import overload_of
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.ir.signature.caller import Caller
from qfuse.ir.signature.run import run_flat
from qfuse.rewrite.compare import compare
from qfuse.rewrite.tolerance import MODEL

# Ops that a trace may omit depending on sizes: at size 1, a slice may be the whole tensor.
_IDLE = (
    "aten.sym_",
    "aten._assert",
    "aten.alias.",
    "aten.contiguous.",
    "aten.expand.",
    "aten.slice.",
)


class ProgramSource(Protocol):
    """A model that can be traced again with other sizes."""

    @property
    def leaves(self) -> Sequence[Any]:
        """The leaves of the example, in the order of the captured signature."""
        ...

    def trace(self, leaves: Sequence[Any]) -> ExportedProgram:
        """Return the traced program of a call with these leaves and static sizes."""
        ...

    def capture(self, program: ExportedProgram) -> CapturedGraph:
        """Return its functional graph."""
        ...


def check_size_one(
    captured: CapturedGraph, traced: ExportedProgram, source: ProgramSource
) -> CapturedGraph:
    """Return ``captured`` with ranges that start at 2 where the graph is wrong for 1.

    Args:
        captured: The graph; warnings are added to its log.
        traced: The traced program of the graph.
        source: The model.
    """
    # A size that was 1 in the example was traced as such.
    names = [name for name, s in captured.signature.symbols.items() if s.low <= 1 < s.hint]
    if not names or _agrees(captured, traced, source, names):
        return captured
    # Find the sizes that fail alone; if none does, cut all of them.
    guilty = [n for n in names if len(names) == 1 or not _agrees(captured, traced, source, [n])]
    symbols = dict(captured.signature.symbols)
    for name in guilty or names:
        symbols[name] = replace(symbols[name], low=2)
        label = symbols[name].label or name
        captured.log.add(
            Noted(
                "capture",
                f"{label} = 1 is refused: the model takes another path there than the captured "
                "one, with other results. Compile it separately for that size",
                warn=True,
            )
        )
    return replace(captured, signature=replace(captured.signature, symbols=symbols))


def _agrees(
    captured: CapturedGraph, traced: ExportedProgram, source: ProgramSource, names: list[str]
) -> bool:
    """Whether the graph returns the model's results when the sizes ``names`` are 1."""
    leaves = [
        _cut(leaf, spec.shape, names)
        for leaf, spec in zip(source.leaves, captured.signature.inputs, strict=True)
    ]
    try:
        inputs = Caller(captured.signature).check(leaves)
    except InputError:
        return True  # The relations exclude such a call.
    try:
        small = source.trace(leaves)
        if _same_calls(traced, small):
            return True
        reference = source.capture(small)
    except CaptureError:
        return False
    return _same_results(captured, reference, inputs, leaves)


def _cut(leaf: Any, shape: Sequence[int | str], names: list[str]) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    for axis, size in enumerate(shape):
        if size in names:
            # A copy, since the narrowed view has the strides of the larger tensor.
            leaf = leaf.narrow(axis, 0, 1).clone()
    return leaf


def _same_results(
    captured: CapturedGraph,
    reference: CapturedGraph,
    inputs: Sequence[torch.Tensor],
    leaves: Sequence[Any],
) -> bool:
    if any(value.is_meta for value in inputs) or any(map(is_random, captured.graph.nodes)):
        return False  # Missing or random values cannot be compared.
    # The caller's random state must not depend on this check.
    with torch.random.fork_rng(devices=[]):
        mine = run_flat(captured.module, inputs)
        theirs = run_flat(reference.module, Caller(reference.signature).check(leaves))
    return len(mine) == len(theirs) and all(
        compare(a, b, None, Exactness.ROUNDING, MODEL).wrong is None
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        else a == b
        for a, b in zip(mine, theirs, strict=True)
    )


def _same_calls(first: ExportedProgram, second: ExportedProgram) -> bool:
    """Whether two traces call the same operators with the same arguments, except sizes."""
    same = _Pairs()
    return all(
        a is not None and b is not None and same.calls(a, b)
        for a, b in zip_longest(_calls(first), _calls(second))
    )


class _Pairs:
    """The calls of one trace, each with the call of the other one that it corresponds to."""

    def __init__(self) -> None:
        self._partners: dict[Node, Node] = {}

    def calls(self, a: Node, b: Node) -> bool:
        """Whether two calls are equal. The calls of their arguments have been compared before."""
        self._partners[a] = b
        return (
            a.target is b.target
            and self._sequences(a.args, b.args)
            and a.kwargs.keys() == b.kwargs.keys()
            and self._sequences(tuple(a.kwargs.values()), tuple(b.kwargs.values()))
        )

    def _sequences(self, first: Sequence[Any], second: Sequence[Any]) -> bool:
        return len(first) == len(second) and all(map(self._arguments, first, second))

    def _arguments(self, a: Any, b: Any) -> bool:
        if _is_symbolic(a):
            # The small trace has numbers where the other one has symbols.
            return isinstance(b, int) or _is_symbolic(b)
        if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
            return self._sequences(a, b)
        if isinstance(a, Node) and isinstance(b, Node):
            return self._nodes(_of_idle(a), _of_idle(b))
        if isinstance(a, Node) or isinstance(b, Node):
            return False
        return type(a) is type(b) and bool(a == b)

    def _nodes(self, a: Node, b: Node) -> bool:
        if a in self._partners:
            return self._partners[a] is b
        # Inputs and constants have the same names in both traces; items have no operator.
        return a.op == b.op and a.target == b.target and self._sequences(a.args, b.args)


def _of_idle(node: Node) -> Node:
    """Return the operand of calls that only one of the traces may have."""
    while str(overload_of(node)).startswith(_IDLE) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _calls(program: ExportedProgram) -> list[Node]:
    ops = [(node, overload_of(node)) for node in program.graph.nodes]
    return [node for node, op in ops if op is not None and not str(op).startswith(_IDLE)]


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, Node) and isinstance(value.meta.get("val"), torch.SymInt)
