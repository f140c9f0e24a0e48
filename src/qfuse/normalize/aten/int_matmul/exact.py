"""``_int_mm`` is spelled as a product that is right on every machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.ops.views import node_of, tensor_of
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
class IntMmSite:
    """An ``_int_mm`` and its factors."""

    node: Node
    left: Node
    right: Node


class ExactIntMm(Rule[IntMmSite]):
    """``_int_mm(a, b)`` becomes ``mm(int32(a), int32(b))``.

    Before::

        a int8, b int8 -> _int_mm

    After::

        a int8 -> cast int32 --+
        b int8 -> cast int32 --+-> mm

    Exact. On CPU ``_int_mm`` gives garbage without an error for one row whose stride is not K, for
    K = 1, and for all sizes where the instruction set has no 8-bit dot product; ``mm`` of int32 is
    right everywhere. Rules that know the scales turn the product into a quantized linear; what
    they leave is right, if slower.

    Refuses: another device than the CPU: kernels there are right, and ``mm`` of int32 is missing.
    """

    name = "exact-int-mm"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten._int_mm.default,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> IntMmSite | Miss:
        """Match any call on the CPU."""
        a = arguments(node)
        device = tensor_of(node).device.type
        if device != "cpu":
            text = "on {} it is right as it is"
            return Miss(MissCode.PATTERN, node, text, device, progress=0)
        return IntMmSite(node, node_of(a["self"]), node_of(a["mat2"]))

    def rewrite(self, site: IntMmSite, rw: Rewriter) -> None:
        """Widen both factors and multiply."""
        left, right = (
            rw.call(aten._to_copy.default, factor, dtype=torch.int32)
            for factor in (site.left, site.right)
        )
        y = rw.replay(aten.mm.default, (left, right), {}, tensor_of(site.node))
        rw.replace(site.node, y)
