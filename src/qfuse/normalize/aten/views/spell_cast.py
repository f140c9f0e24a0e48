"""Write every op that casts as ``_to_copy``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops.views import node_of, tensor_of
from qfuse.ir.quant.spec import dtype_name
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
class Conversion:
    """A call that casts ``source``."""

    node: Node
    source: Node


class SpellCast(Rule[Conversion]):
    """``to(x, dtype)``, ``to(x, y)`` and ``type_as(x, y)`` become ``_to_copy(x, dtype=...)``.

    Before::

        x: int8 -> to.dtype(float32) -> mul

    After::

        x: int8 -> _to_copy(dtype=float32) -> mul

    Graphs have these ops before decompositions. After them, ``to(x, y)`` is a ``_to_copy`` that
    names the device of ``y``. Exact: where the dtype changes, they copy.

    Refuses: a call that keeps the dtype, which may return its operand; one that changes device,
    layout, memory format or pinning.
    """

    name = "spell-cast"
    anchors: ClassVar[tuple[OpOverload, ...]] = (
        aten.to.dtype,
        aten.to.dtype_layout,
        aten.to.device,
        aten.to.other,
        aten.type_as.default,
        aten._to_copy.default,
    )
    exactness = Exactness.EXACT

    def match(self, node: Node) -> Conversion | Miss:
        """Match a call that changes nothing but the dtype."""
        a = arguments(node)
        source = node_of(a["self"])
        old, new = tensor_of(source), tensor_of(node)
        if old.dtype == new.dtype:
            text = "it keeps the dtype {}"
            return Miss(MissCode.DTYPE, node, text, dtype_name(old.dtype), progress=0)
        named = {name for name, value in node.kwargs.items() if value is not None}
        if is_call(node, aten._to_copy.default) and named <= {"dtype"}:
            return Miss(MissCode.PATTERN, node, "it names the dtype alone", progress=0)
        formats = {None, torch.preserve_format}
        same = old.device == new.device and old.layout == new.layout
        if not same or a.get("memory_format") not in formats or a.get("pin_memory"):
            text = "it also changes the device, the layout, the memory format or pinning"
            return Miss(MissCode.ARGUMENT, node, text, progress=0)
        return Conversion(node, source)

    def rewrite(self, site: Conversion, rw: Rewriter) -> None:
        """Call ``_to_copy``."""
        dtype = tensor_of(site.node).dtype
        rw.replace(site.node, rw.call(aten._to_copy.default, site.source, dtype=dtype))
