"""``aten._scaled_mm_v2``: a product of two float8 matrices with scales in recipes."""

from __future__ import annotations

from typing import ClassVar

from torch.fx.node import Argument

from qfuse.ir.ops.views import node_of
from qfuse.normalize.importers.library.scaled_mm import (
    NormalizeScaledMm,
    ScaledOperands,
    ScaledSite,
    read_scaled,
)
from qfuse.normalize.importers.rule import RefusedError, known_arguments
from qfuse.rewrite.prelude import MissCode, Node, OpOverload, aten

_KNOWN = (
    "self",
    "mat2",
    "scale_a",
    "recipe_a",
    "swizzle_a",
    "scale_b",
    "recipe_b",
    "swizzle_b",
    "bias",
    "out_dtype",
    "contraction_dim",
    "use_fast_accum",
)
# `torch.nn.functional.ScalingType`: one scale for the tensor, one per row.
_TENSOR, _ROW = 0, 1


class NormalizeScaledMmV2(NormalizeScaledMm):
    """``_scaled_mm_v2`` with one scale per tensor or per row is read as ``_scaled_mm``.

    Refuses: what that refuses; recipes of blocks, of two levels, and swizzled scales; a given
    contraction axis.
    """

    name = "normalize-scaled-mm-v2"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten._scaled_mm_v2.default,)

    def read(self, node: Node) -> ScaledSite:
        """View a call."""
        a = known_arguments(node, _KNOWN)
        if a.get("contraction_dim"):
            raise RefusedError(MissCode.ARGUMENT, node, "its contraction axis is given")
        left = _scale(node, a["scale_a"], a["recipe_a"], a["swizzle_a"])
        right = _scale(node, a["scale_b"], a["recipe_b"], a["swizzle_b"])
        factors = node_of(a["self"]), node_of(a["mat2"])
        return read_scaled(node, ScaledOperands(*factors, left, right, a["bias"], a["out_dtype"]))


def _scale(node: Node, scales: Argument, recipes: Argument, swizzles: Argument) -> Node:
    """Return the only scale of a factor."""
    if not isinstance(scales, (list, tuple)) or len(scales) != 1:
        raise RefusedError(MissCode.GRANULARITY, node, "its scales have several levels")
    if recipes not in ([_TENSOR], [_ROW], (_TENSOR,), (_ROW,)):
        text = "its scales are in the recipe {}, and only those per tensor and per row are read"
        raise RefusedError(MissCode.GRANULARITY, node, text, recipes)
    if isinstance(swizzles, (list, tuple)) and any(swizzles):
        raise RefusedError(MissCode.ARGUMENT, node, "its scales are swizzled")
    return node_of(scales[0])
