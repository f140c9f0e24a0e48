"""A copy that changes nothing is nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from qfuse.ir.alias import leaves_graph, memory_of
from qfuse.ir.events import Exactness, MissCode
from qfuse.ir.schema import arguments
from qfuse.ir.sizes import same_shape
from qfuse.ir.views import node_of, tensor_of
from qfuse.rewrite.rule import Miss, Rule

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.fx import Node

    from qfuse.rewrite.rewriter import Rewriter

__all__ = ["DropCopy", "IdleCopy"]

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class IdleCopy:
    """A copy, and what it copies."""

    node: Node
    source: Node


class DropCopy(Rule[IdleCopy]):
    """``clone``, ``detach`` and a cast to the dtype that is there already become their source.

    Before::

        x: float32 -> _to_copy(dtype=float32) -> relu

    After::

        x: float32 -> relu

    Refuses: a copy that changes dtype, device or strides, or pins memory; a copy that keeps what
    the caller gets apart from an input, a constant or another output.
    """

    name = "drop-copy"
    anchors: ClassVar[tuple[OpOverload, ...]] = (
        _aten._to_copy.default,
        _aten.clone.default,
        _aten.contiguous.default,
        _aten.detach.default,
        _aten.lift_fresh_copy.default,
        _aten.to.dtype,
        _aten.to.dtype_layout,
        _aten.type_as.default,
    )
    exactness = Exactness.EXACT

    def match(self, node: Node) -> IdleCopy | Miss:
        """Match a copy that is equal to its source in all that can be seen of a tensor."""
        a = arguments(node)
        source = node_of(a["self"])
        old, new = tensor_of(source), tensor_of(node)
        same = old.dtype == new.dtype and old.device == new.device and old.layout == new.layout
        if not same or a.get("pin_memory"):
            return Miss(MissCode.DTYPE, node, "it changes the type or the place", progress=0)
        if not same_shape(old.stride(), new.stride()):
            return Miss(MissCode.SHAPE, node, "it changes the strides", progress=0)
        if leaves_graph(node):
            memory = memory_of(source)
            if memory.op != "call_function" or leaves_graph(memory):
                text = "the caller gets a copy of {}, not the tensor itself"
                return Miss(MissCode.SHARED, memory, text, memory.name, progress=0)
        return IdleCopy(node, source)

    def rewrite(self, site: IdleCopy, rw: Rewriter) -> None:
        """Let every reader read the source."""
        rw.replace(site.node, site.source)
