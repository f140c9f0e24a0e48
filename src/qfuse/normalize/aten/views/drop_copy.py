"""Drop copies that change nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qfuse.ir.dtypes import widens
from qfuse.ir.graph.alias import leaves_graph, memory_of
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.views import dtype_of, node_of, tensor_of
from qfuse.ir.sizes import same_shape
from qfuse.rewrite.prelude import (
    Exactness,
    Miss,
    MissCode,
    Node,
    OpOverload,
    Rewriter,
    Rule,
    arguments,
    aten,
)


@dataclass(frozen=True, slots=True)
class IdleCopy:
    """A copy, and the value that it equals."""

    node: Node
    source: Node


class DropCopy(Rule[IdleCopy]):
    """``clone``, ``detach`` and casts to the same dtype become their operand.

    So do a dropout that is not training, and the cast back of a cast that widens.

    Before::

        x: float32 -> _to_copy(dtype=float32) -> relu

    After::

        x: float32 -> relu

    Refuses: a dropout that is training; a copy that changes dtype, device or strides, or pins
    memory; a copy that keeps a graph output separate from an input, a constant or another output.
    """

    name = "drop-copy"
    anchors: ClassVar[tuple[OpOverload, ...]] = (
        aten._to_copy.default,
        aten.clone.default,
        aten.contiguous.default,
        aten.detach.default,
        aten.lift_fresh_copy.default,
        aten.lift_fresh.default,
        aten.alias_copy.default,
        aten.detach_copy.default,
        aten.dropout.default,
        aten.to.dtype,
        aten.to.dtype_layout,
        aten.to.device,
        aten.to.other,
        aten.type_as.default,
    )
    exactness = Exactness.EXACT

    def match(self, node: Node) -> IdleCopy | Miss:
        """Match a copy with the same dtype, device and strides as its operand."""
        a = arguments(node)
        source = _origin(node)
        old, new = tensor_of(source), tensor_of(node)
        if a.get("train"):
            return Miss(MissCode.ARGUMENT, node, "it drops elements at random", progress=0)
        same = old.dtype == new.dtype and old.device == new.device and old.layout == new.layout
        if not same or a.get("pin_memory"):
            return Miss(MissCode.DTYPE, node, "it changes the dtype or the device", progress=0)
        # A caller or a view further down may depend on the strides.
        if not same_shape(old.stride(), new.stride()):
            return Miss(MissCode.SHAPE, node, "it changes the strides", progress=0)
        if leaves_graph(node):
            memory = memory_of(source)
            # Writing to one output must not change an input, a weight or another output.
            if memory.op != "call_function" or leaves_graph(memory):
                text = "the caller gets a copy of {}, not the tensor itself"
                return Miss(MissCode.SHARED, memory, text, memory.name, progress=0)
        return IdleCopy(node, source)

    def rewrite(self, site: IdleCopy, rw: Rewriter) -> None:
        """Replace all uses by the operand."""
        rw.replace(site.node, site.source)


def _origin(node: Node) -> Node:
    """Return the operand of a copy; for the cast back of a cast that widens, that one's operand."""
    a = arguments(node)
    source = node_of(a["self"] if "self" in a else a["input"])
    inner = cast_source(source) if cast_source(node) is source else None
    if inner is None or dtype_of(inner) != dtype_of(node):
        return source
    return inner if widens(dtype_of(inner), dtype_of(source)) else source
