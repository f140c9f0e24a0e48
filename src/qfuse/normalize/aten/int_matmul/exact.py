"""Replace ``_int_mm`` by a product that is correct on every machine."""

from __future__ import annotations

import torch

from qfuse.ir.ops.views import tensor_of
from qfuse.rewrite.pattern import Match, PatternRule, V, op, where
from qfuse.rewrite.prelude import Exactness, MissCode, Node, Rewriter, aten

LEFT, RIGHT = V("left"), V("right")


def _is_on_cpu(node: Node) -> bool:
    return tensor_of(node).device.type == "cpu"


class ExactIntMm(PatternRule):
    """``_int_mm(a, b)`` becomes ``mm(int32(a), int32(b))``.

    Before::

        a int8, b int8 -> _int_mm

    After::

        a int8 -> cast int32 --+
        b int8 -> cast int32 --+-> mm

    Exact. On CPU ``_int_mm`` returns garbage without an error for one row whose stride is not K,
    for K = 1, and for all sizes where the instruction set has no 8-bit dot product; ``mm`` of int32
    is correct everywhere. ``fuse-scaled-product`` turns scaled products into a quantized linear;
    the others are correct, if slower.

    Refuses: a device other than the CPU: its kernels are correct, and ``mm`` of int32 is missing.
    """

    name = "exact-int-mm"
    exactness = Exactness.EXACT
    pattern = (
        op(aten._int_mm.default, LEFT, RIGHT)
        .given(where(_is_on_cpu, MissCode.PATTERN, "it is correct as it is on other devices"))
        .core()
    )

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Widen both factors and multiply."""
        left, right = (
            rw.call(aten._to_copy.default, site[factor], dtype=torch.int32)
            for factor in (LEFT, RIGHT)
        )
        y = rw.replay(aten.mm.default, (left, right), {}, tensor_of(site.node))
        rw.replace(site.node, y)
