"""Weights of linears that are stored in float16 and multiplied in float32 get a dequantize."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.linear import as_linear
from qfuse.ir.ops.views import dtype_of, has_values
from qfuse.normalize.match.constants import derived, evaluated, unit_scale
from qfuse.normalize.match.quantized_values import full_range_spec
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule, aten


@dataclass(frozen=True, slots=True)
class HalfWeightSite:
    """A weight that is cast to float32.

    Attributes:
        weight: The cast.
        half: The float16 values.
        value: The values if they are computed from other constants, or ``None``.
    """

    weight: Node
    half: Node
    value: torch.Tensor | None


class DequantizeHalfWeight(Rule[HalfWeightSite]):
    """``linear(x, cast(w))`` with a constant float16 ``w`` becomes ``linear(x, dequantize(w, 1))``.

    Before::

        const w float16 -> cast to float32 -> linear

    After::

        const w float16 -> qfuse.dequantize(1) -> linear

    This is how PT2E writes linears with dynamic float16. The weight stays float16 in memory. One
    that is itself cast from a float32 constant is cast at compile time.

    Refuses: a weight that is not constant; types other than float16 and float32.
    """

    name = "dequantize-half-weight"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.linear.default,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> HalfWeightSite | Miss:
        """Match a linear whose weight is cast from float16."""
        linear = as_linear(node)
        assert linear is not None, "the anchor is a linear"
        half = cast_source(linear.weight)
        if half is None or dtype_of(half) is not torch.float16:
            text = "the weight is not cast from float16"
            return Miss(MissCode.PATTERN, node, text, progress=0)
        if dtype_of(linear.weight) is not torch.float32:
            text = "a float16 weight is cast to {}"
            return Miss(MissCode.DTYPE, linear.weight, text, dtype_of(linear.weight))
        held = constant_of(half)
        if held is not None and has_values(held):
            return HalfWeightSite(linear.weight, half, None)
        value = evaluated(half)
        if value is None:
            text = "the float16 weight is computed at run time"
            return Miss(MissCode.NOT_CONSTANT, half, text)
        return HalfWeightSite(linear.weight, half, value)

    def rewrite(self, site: HalfWeightSite, rw: Rewriter) -> None:
        """Replace the cast by a dequantize with the scale 1."""
        half = site.half
        if site.value is not None:
            half = derived(rw, half, site.value, "half")
        spec = full_range_spec(half, (None, None), torch.float32)
        scale = unit_scale(rw, half, 2)
        rw.replace(site.weight, rw.call(ops.dequantize, half, scale, None, str(spec)))
