"""Combine equal quantizes, dequantizes, choices of parameters and the views between them."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from qfuse.ir import ops
from qfuse.ir.alias import leaves_graph
from qfuse.ir.collectives import WAITS
from qfuse.ir.events import Exactness, Fired
from qfuse.ir.movements import MOVEMENT_OPS, SPLITS
from qfuse.ir.program import constant_of, place_of
from qfuse.ir.schema import arguments, overload_of
from qfuse.ir.views import bits_of
from qfuse.optimize.joining import JOINS
from qfuse.rewrite.driver import Context, PassResult
from qfuse.rewrite.rewriter import GraphEditor
from qfuse.rewrite.settle import settle
from qfuse.rewrite.whole import Pass

if TYPE_CHECKING:
    from collections.abc import Hashable

    from qfuse.ir.program import StageGraph

__all__ = ["Combine"]

_aten = torch.ops.aten

# A clone is there to be a tensor of its own, and ranks wait as often as they were told to.
_KEPT_APART = (_aten.clone.default, _aten.alias.default, *WAITS)

_COMBINABLE = frozenset(
    (
        *ops.CANONICAL,
        *ops.FUSED,
        _aten.linear.default,
        *(op for op in MOVEMENT_OPS if op not in _KEPT_APART),
        *SPLITS,
        *JOINS,
        _aten.constant_pad_nd.default,
        _aten.clamp.default,
        _aten.sym_size.int,
        _aten._to_copy.default,
    )
)
# Comparing bits costs reading them; parameters are small, weights are compared by identity.
_BITS_LIMIT = 1 << 16


class Combine(Pass):
    """Value numbering over quantization ops and the movement between them.

    Two nodes are equal when they call the same op with equal arguments: nodes by value number,
    numbers by type and value, constants by identity or, when they are small, by bits. A node that
    leaves the graph is kept apart, so that outputs do not begin to alias.
    """

    name = "combine"
    exactness = Exactness.EXACT

    def run(self, program: StageGraph, context: Context) -> PassResult:
        """Combine in one sweep, in topological order."""
        result = PassResult()
        editor = GraphEditor(program.module)
        numbers: dict[Hashable, Node] = {}
        constants: dict[Hashable, Node] = {}
        for node in list(program.graph.nodes):
            first = self._find(node, numbers, constants)
            if first is None or first is node:
                continue
            if leaves_graph(node) and leaves_graph(first):
                continue
            key = f"{context.room}/{self.name}@{node.name}"
            if node.op != "get_attr" and not context.gate.allows(key):
                continue
            place = place_of(node)
            is_constant = node.op == "get_attr"
            rw = editor.rewriter(self.name, node)
            rw.replace(node, first)
            if not settle(rw, context, program.log, key, self.exactness, place) or is_constant:
                continue
            note = f"the same as %{first.name}"
            program.log.add(
                Fired(context.room, self.name, key, self.exactness, (place,), (first.name,), note)
            )
            result.fired[self.name] += 1
        return result

    def _find(
        self,
        node: Node,
        numbers: dict[Hashable, Node],
        constants: dict[Hashable, Node],
    ) -> Node | None:
        """Return the first node equal to ``node``, which may be itself; ``None`` is not asked."""
        if node.op == "get_attr":
            return _find_constant(node, constants)
        if node.target is operator.getitem:
            return numbers.setdefault((operator.getitem, node.args[0], node.args[1]), node)
        op = overload_of(node)
        if op not in _COMBINABLE:
            return None
        key = (op, tuple((k, _freeze(v)) for k, v in sorted(arguments(node).items())))
        return numbers.setdefault(key, node)


def _find_constant(node: Node, constants: dict[Hashable, Node]) -> Node | None:
    value = constant_of(node)
    if value is None:
        return None
    kind = (value.dtype, value.device, tuple(value.shape), value.stride())
    small = value.numel() * value.element_size() <= _BITS_LIMIT
    return constants.setdefault((*kind, bits_of(value) if small else id(value)), node)


def _freeze(value: object) -> Hashable:
    """Make an argument hashable such that equal means equal: 1, 1.0 and True differ."""
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(v) for v in value)
    if isinstance(value, Node):
        return value
    return (type(value), repr(value))
