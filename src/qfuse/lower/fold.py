"""Constant folding of calls with small results."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch.fx.node import map_arg

from qfuse.ir.graph.alias import leaves_graph
from qfuse.ir.graph.schema import overload_of
from qfuse.ir.graph.stage_graph import StageGraph, constant_of
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.prelude import Exactness, Node, Rewriter
from qfuse.rewrite.session import Applied, RewriteSession

FOLDED_BYTES = 1 << 16
"""The largest result: scales, zero points and their reciprocals fit, and weights stay quantized."""

GROWN_BYTES = 1 << 8
"""The largest result that may exceed its constants, such as a scale that is cast to float64."""


def fold_constants(program: StageGraph, context: RewriteContext) -> int:
    """Replace small pure calls on constants by their values; return how many were folded.

    The value is computed by the ATen op that would run at run time, so this is exact. A result that
    is larger than its constants stays a call, such as a dequantized weight or the rows of a lookup;
    its operands are folded.
    """
    session = RewriteSession(program, context)
    sources = _foldable(program)
    folded = 0
    # Users first, so that it is known which operands are still needed.
    for node in reversed(list(program.graph.nodes)):
        if node not in sources or all(user in sources for user in node.users):
            continue
        if _bytes(node) > max(GROWN_BYTES, sum(map(_bytes, sources[node]))):
            del sources[node]
            continue
        edit = partial(_fold, node)
        done = session.rewrite_always("fold-constants", node, edit, proof=Exactness.EXACT)
        if isinstance(done, Applied):
            folded += 1
        else:
            del sources[node]
    return folded


def _foldable(program: StageGraph) -> dict[Node, frozenset[Node]]:
    """Return the constants from which each small pure call is computed."""
    found: dict[Node, frozenset[Node]] = {}
    for node in program.graph.nodes:
        # The caller may write to an output, so every call must return a new tensor.
        if not _is_small_and_pure(node) or leaves_graph(node):
            continue
        operands = [_sources(operand, found) for operand in node.all_input_nodes]
        known = [sources for sources in operands if sources is not None]
        if len(known) == len(operands):
            found[node] = frozenset().union(*known)
    return found


def _sources(operand: Node, found: Mapping[Node, frozenset[Node]]) -> frozenset[Node] | None:
    if constant_of(operand) is not None:
        return frozenset((operand,))
    return found.get(operand)


def _fold(node: Node, rw: Rewriter) -> None:
    # A view would keep the whole base alive for a few elements.
    value = _computed(node).clone()
    rw.replace(node, rw.constant(value, f"{node.name}_folded"))


def _is_small_and_pure(node: Node) -> bool:
    op = overload_of(node)
    if op is None or op.namespace != "aten" or not node.all_input_nodes:
        return False
    fake = node.meta["val"]
    if not isinstance(fake, torch.Tensor) or any(not isinstance(s, int) for s in fake.shape):
        return False
    # `bernoulli` of a constant differs from call to call.
    return _bytes(node) <= FOLDED_BYTES and torch.Tag.nondeterministic_seeded not in op.tags


def _bytes(node: Node) -> int:
    fake = node.meta["val"]
    return int(fake.numel()) * int(fake.element_size())


def _computed(node: Node) -> torch.Tensor:
    """Return the value of a foldable call."""
    known: dict[Node, torch.Tensor] = {}
    # A chain may be longer than Python's stack.
    stack = [node]
    while stack:
        top = stack[-1]
        later = [n for n in top.all_input_nodes if n not in known and constant_of(n) is None]
        if later:
            stack += later
            continue
        stack.pop()
        args, kwargs = map_arg((top.args, top.kwargs), lambda n: known.get(n, constant_of(n)))
        assert callable(top.target), "a foldable node is a call"
        with torch.no_grad():
            known[top] = top.target(*args, **kwargs)
    return known[node]
