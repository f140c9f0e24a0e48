"""Weights that are rounded and clamped, and stay in float, are stored as integers."""

from __future__ import annotations

import torch
from torch.fx.node import Argument

from qfuse.ir.dtypes import COMPUTE_DTYPES
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.views import dtype_of, has_values
from qfuse.ir.quant.spec import dtype_range
from qfuse.normalize.aten.qdq.quantize import CHECKS, CODES, ZERO_FACTOR, call_quantize
from qfuse.normalize.aten.qdq.scale_factor import Factor, zero_factor
from qfuse.rewrite.pattern import Capture, Match, PatternRule, guard, let
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, Rewriter, aten

_STORAGE = Capture[torch.dtype]("storage")
_ARITHMETIC = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)


@guard(
    MissCode.NOT_CONSTANT, "it is not a constant, and may be NaN, which integers cannot be", at="x"
)
def _is_finite(x: Node) -> bool:
    value = constant_of(x)
    return value is not None and has_values(value) and bool(value.isfinite().all())


@guard(MissCode.PATTERN, "its rounded values are not multiplied by a scale")
def _is_multiplied(node: Node) -> bool:
    used = [is_call(user, *_ARITHMETIC) for user in node.users]
    return dtype_of(node) in COMPUTE_DTYPES and bool(used) and all(used)


def _storage(node: Node, low: float, high: float) -> torch.dtype | Miss:
    for dtype in (torch.int8, torch.uint8):
        least, most = dtype_range(dtype)
        if least <= low <= high <= most and (low, high) == (int(low), int(high)):
            return dtype
    text = "the bounds [{}, {}] are not those of 8-bit integers"
    return Miss(MissCode.RANGE, node, text, low, high)


def _zero_factor(
    node: Node, scale_factor: Factor, zero_point: Argument, storage: torch.dtype
) -> Factor | Miss | None:
    return zero_factor(node, zero_point, scale_factor.shape, storage)


class StoreRoundedWeight(PatternRule):
    """``clamp(round(w / scale), -128, 127)`` of a constant becomes a cast of ``quantize``.

    Before::

        w -> div(scale) -> round -> clamp(-128, 127) -> mul(scale)

    After::

        w, scale -> qfuse.quantize -> cast to float -> mul(scale)

    The cast and the product are then a dequantize, and the weight is stored in 8 bits. Rounding,
    since a small negative weight is rounded to a negative zero, which no integer is.

    Refuses: what ``quantize-chain`` refuses; a value that is computed at run time, infinite or NaN;
    rounded values that are cast, or used otherwise than in sums, differences, products and
    quotients.
    """

    name = "store-rounded-weight"
    exactness = Exactness.ROUNDING
    pattern = (
        CODES.given(_is_finite, _is_multiplied)
        .core()
        .given(let(_STORAGE, _storage), *CHECKS, let(ZERO_FACTOR, _zero_factor))
    )

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Quantize, and cast the integers."""
        q = call_quantize(site, rw, site[_STORAGE])
        rw.replace(site.node, rw.call(aten._to_copy.default, q, dtype=dtype_of(site.node)))
