"""Fuse a float cast into the epilogue of a fused product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.dtypes import FLOATS
from qfuse.ir.ops.epilogue import Cast
from qfuse.ir.ops.product import FusedProduct
from qfuse.optimize.fuse.epilogue import append_op, open_product
from qfuse.patterns.casts import besides_dtype
from qfuse.rewrite.prelude import (
    Exactness,
    Miss,
    MissCode,
    Node,
    OpOverload,
    Rewriter,
    Rule,
    arguments,
)


@dataclass(frozen=True, slots=True)
class CastSite:
    """A fused op and the cast that is its only user."""

    fused: FusedProduct
    node: Node
    dtype: torch.dtype


class FuseCast(Rule[CastSite]):
    """``cast(qfuse.linear(...))`` becomes one op that rounds at the place of the cast.

    The same for ``qfuse.convolution`` and ``qfuse.matmul``.

    Refuses: a cast to an integer or to float64; a copy that also changes device, layout or memory
    format.
    """

    name = "fuse-cast"
    anchors: ClassVar[tuple[OpOverload, ...]] = (torch.ops.aten._to_copy.default,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> CastSite | Miss:
        """Match a pure float cast of an open fused op."""
        a = arguments(node)
        fused = open_product(a["self"], node)
        if isinstance(fused, Miss):
            return fused
        dtype = a["dtype"]
        if dtype not in FLOATS or not isinstance(dtype, torch.dtype):
            # The integers of a product that nothing scales: the cast is the result itself.
            is_float = isinstance(dtype, torch.dtype) and dtype.is_floating_point
            text = "a cast to {} is not an epilogue"
            return Miss(MissCode.DTYPE, node, text, dtype, progress=3 if is_float else 0)
        moved = besides_dtype(node)
        if moved:
            text = "the copy also changes {}"
            return Miss(MissCode.ARGUMENT, node, text, ", ".join(moved), progress=3)
        return CastSite(fused, node, dtype)

    def rewrite(self, site: CastSite, rw: Rewriter) -> None:
        """Replace the cast by the extended op."""
        append_op(site.fused, site.node, Cast(site.dtype), rw)
