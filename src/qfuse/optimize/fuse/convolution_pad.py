"""Fuse a padding with zeros into the padding of a fused convolution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.convolution import FusedConvolution, as_fused_convolution, padding_of
from qfuse.ir.ops.views import QuantParams, node_of, shape_of
from qfuse.ir.quant.block import covers
from qfuse.ir.quant.spec import ZeroPointDomain
from qfuse.optimize.fuse.epilogue import replace_by
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
class PadSite:
    """A fused convolution, the value before the padding, and the padding of both."""

    fused: FusedConvolution
    x: Node
    padding: tuple[int, ...]


class FusePad(Rule[PadSite]):
    """``qfuse.convolution(pad(q, zero_point))`` becomes a convolution with more padding.

    Before::

        q -> constant_pad_nd(value=zero_point) -> qfuse.convolution(padding=0)

    After::

        q -> qfuse.convolution(padding=1)

    A float activation is padded with 0. Other users of the padded value keep it.

    Refuses: another value than the one that stands for 0; a zero point that is not one constant
    integer, or that is a float offset; several scales along a padded axis; a crop; padded channels;
    a transposed convolution.
    """

    name = "fuse-pad"
    anchors: ClassVar[tuple[OpOverload, ...]] = (ops.convolution,)
    exactness = Exactness.EXACT
    # The same products; a library picks its algorithm, and so an order of sums, by the padding.
    proof = Exactness.ROUNDING

    def match(self, node: Node) -> PadSite | Miss:
        """Match a convolution of a padded activation."""
        fused = as_fused_convolution(node)
        assert fused is not None, "the anchor is a fused convolution"
        if not is_call(fused.x, aten.constant_pad_nd.default):
            return Miss(MissCode.PATTERN, node, "the activation is not padded", progress=0)
        if fused.transposed:
            text = "the padding of a transposed convolution crops its result"
            return Miss(MissCode.ARGUMENT, node, text)
        a = arguments(fused.x)
        padding = _whole_padding(a["pad"], fused)
        if isinstance(padding, Miss):
            return padding
        return _refuse_value(a["value"], fused) or PadSite(fused, node_of(a["self"]), padding)

    def rewrite(self, site: PadSite, rw: Rewriter) -> None:
        """Replace the convolution."""
        padded = replace(site.fused, x=site.x, padding=site.padding)
        replace_by(padded, site.fused.node, rw)


def _whole_padding(pads: object, fused: FusedConvolution) -> tuple[int, ...] | Miss:
    """Return the padding of both ops."""
    numbers: Sequence[object] = pads if isinstance(pads, (list, tuple)) else ()
    known = [number for number in numbers if isinstance(number, int) and number >= 0]
    spatial = fused.spatial
    if len(known) < len(numbers) or len(known) % 2:
        return Miss(MissCode.ARGUMENT, fused.x, "the padding is not made of sizes to add")
    # From the last axis on: before and after.
    sides = [(known[i], known[i + 1]) for i in range(0, len(known), 2)]
    if any(side != (0, 0) for side in sides[spatial:]):
        return Miss(MissCode.ARGUMENT, fused.x, "channels or images are padded too")
    sides = [*sides[:spatial], *[(0, 0)] * (spatial - len(sides))]
    added = zip(fused.sides, reversed(sides), strict=True)
    return padding_of([(own[0] + more[0], own[1] + more[1]) for own, more in added])


def _refuse_value(value: object, fused: FusedConvolution) -> Miss | None:
    """Refuse a padding value that does not stand for 0, and scales that differ between pixels."""
    if not isinstance(value, (int, float)):
        return Miss(MissCode.ARGUMENT, fused.x, "the padding value is computed at run time")
    params, zero = fused.x_params, 0
    if params is not None:
        refusal = _refuse_blocks(params, fused)
        if refusal is not None:
            return refusal
        found = 0 if params.zero_point is None else _zero_point(params.zero_point)
        if isinstance(found, Miss):
            return found
        zero = found
    # A negative zero is not the zero that a convolution pads with.
    if value == zero and (params is not None or math.copysign(1, value) == 1):
        return None
    text = "it pads with {}, but {} stands for 0"
    return Miss(MissCode.ARGUMENT, fused.x, text, value, zero)


def _refuse_blocks(params: QuantParams, fused: FusedConvolution) -> Miss | None:
    """Refuse scales along the padded axes, of which the unpadded value has fewer."""
    if params.spec.domain is ZeroPointDomain.FLOAT_OFFSET:
        # Then a quantized value is no number of steps away from 0.
        text = "the zero point of the activation is a float offset"
        return Miss(MissCode.ZERO_POINT, fused.x, text)
    spatial = fused.spatial
    blocks = params.spec.block[-spatial:]
    if not all(map(covers, blocks, shape_of(fused.x)[-spatial:])):
        text = "the activation has scales in blocks of {}"
        return Miss(MissCode.GRANULARITY, fused.x, text, params.spec.block_text())
    return None


def _zero_point(node: Node) -> int | Miss:
    known = constant_value(node)
    if known is None or known.numel() != 1 or not float(known.item()).is_integer():
        text = "the zero point of the activation is not one constant integer"
        return Miss(MissCode.ZERO_POINT, node, text)
    return int(known.item())
