"""A copy that nobody can tell from the original is nothing: what dropout leaves in eval mode."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from qfuse.ir.events import Exactness, MissCode
from qfuse.ir.schema import arguments, is_call, overload_of
from qfuse.ir.views import node_of, tensor_of
from qfuse.rewrite.rule import Miss, Rule

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.fx import Node

    from qfuse.rewrite.rewriter import Rewriter

__all__ = ["Copy", "DropCopy"]

_aten = torch.ops.aten
# Ops that may return their input's memory although they are not views by schema.
_MAY_ALIAS = (
    _aten.reshape.default,
    _aten.contiguous.default,
    _aten.flatten.using_ints,
    _aten._unsafe_view.default,
)


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy and its original."""

    node: Node
    source: Node


class DropCopy(Rule[Copy]):
    """``clone(x)`` becomes ``x``.

    Graphs are functional, so nothing writes to either of them.

    Refuses: a copy that changes the strides, since a view behind it may need them; a copy that
    leaves the graph, itself or through views, since the caller may write to what it gets.
    """

    name = "drop-copy"
    anchors: ClassVar[tuple[OpOverload, ...]] = (_aten.clone.default,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> Copy | Miss:
        """Match a copy of the same strides that stays inside."""
        source = node_of(arguments(node)["self"])
        if not _same_strides(source, node):
            return Miss(MissCode.ARGUMENT, node, "the copy changes the strides", progress=0)
        if _leaves(node):
            text = "the copy leaves the graph, and must not share memory"
            return Miss(MissCode.SHARED, node, text, progress=0)
        return Copy(node, source)

    def rewrite(self, site: Copy, rw: Rewriter) -> None:
        """Let every reader read the original."""
        rw.replace(site.node, site.source)


def _same_strides(a: Node, b: Node) -> bool:
    """Whether the strides are the same for every size; symbols are compared as they stand."""
    left, right = tensor_of(a).stride(), tensor_of(b).stride()
    return [str(s) for s in left] == [str(s) for s in right]


def _leaves(node: Node) -> bool:
    """Whether the memory of ``node`` may reach the graph's output."""
    seen = {node}
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if user.op == "output":
                return True
            if user not in seen and _may_alias(user):
                seen.add(user)
                stack.append(user)
    return False


def _may_alias(node: Node) -> bool:
    op = overload_of(node)
    if op is None:
        return node.target is operator.getitem
    return op.is_view or is_call(node, *_MAY_ALIAS)
