"""Weights of convolutions that are quantized values cast to float get a dequantize."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx.node import Argument

from qfuse.ir.dtypes import BYTES
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.constants import is_constant_expression
from qfuse.ir.ops.convolution import CONVOLUTIONS, Convolution, as_convolution
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.quant.spec import dtype_name
from qfuse.normalize.aten.qdq.scale_factor import Factor, zero_factor
from qfuse.normalize.match.constants import unit_scale
from qfuse.normalize.match.quantized_values import (
    QuantizedValues,
    full_range_spec,
    moved_constant,
    quantized_values,
)
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule


@dataclass(frozen=True, slots=True)
class WeightSite:
    """A convolution, the quantized values of its weight, and their zero point."""

    conv: Convolution
    q: Node
    zero_point: Factor | None


class DequantizeWeight(Rule[WeightSite]):
    """``conv(x, cast(w) - z)`` becomes ``conv(x, dequantize(w, 1, z))``.

    Before::

        const w int8 -> cast -> sub(z) -> conv2d -> mul(scale)

    After::

        const w int8 -> qfuse.dequantize(1, z) -> conv2d -> mul(scale)

    Exact: 8-bit integers and their differences are exact in every float dtype. A constant scale
    behind the convolution becomes that of the weight in the stage after this one (``fold-scale``).

    Refuses: a weight that is not constant 8-bit integers; a zero point that is not one constant
    integer; views between the cast and the convolution.
    """

    name = "dequantize-weight"
    anchors: ClassVar[tuple[OpOverload, ...]] = CONVOLUTIONS
    exactness = Exactness.EXACT

    def match(self, node: Node) -> WeightSite | Miss:
        """Match a convolution whose weight is cast."""
        conv = as_convolution(node)
        assert conv is not None, "the anchor is a convolution"
        stored = quantized_values(conv.weight)
        if stored is None or stored.q is conv.weight:
            text = "the weight is not a cast of quantized values"
            return Miss(MissCode.PATTERN, node, text, progress=0)
        refusal = refuse_cast_weight(conv.weight, stored)
        if refusal is not None:
            return refusal
        zero = constant_zero_point(conv.weight, stored.zero, dtype_of(stored.q))
        return zero if isinstance(zero, Miss) else WeightSite(conv, stored.q, zero)

    def rewrite(self, site: WeightSite, rw: Rewriter) -> None:
        """Replace the weight by a dequantize with the scale 1."""
        weight = site.conv.weight
        rank = len(shape_of(weight))
        spec = full_range_spec(site.q, (None,) * rank, dtype_of(weight))
        scale = unit_scale(rw, site.q, rank)
        zero = None if site.zero_point is None else site.zero_point.build(rw)
        rw.replace(weight, rw.call(ops.dequantize, site.q, scale, zero, str(spec)))


def refuse_cast_weight(
    weight: Node, stored: QuantizedValues, dtypes: Collection[torch.dtype] = BYTES
) -> Miss | None:
    """Refuse anything but a cast of constant values of one of ``dtypes``."""
    if stored.views:
        return Miss(MissCode.PATTERN, weight, "the cast weight is reshaped")
    if moved_constant(stored.q) is None and not is_constant_expression(stored.q):
        return Miss(MissCode.NOT_CONSTANT, stored.q, "the cast weight is computed at run time")
    if dtype_of(stored.q) not in dtypes:
        return Miss(MissCode.DTYPE, stored.q, "the weight is {}", dtype_name(dtype_of(stored.q)))
    return None


def constant_zero_point(weight: Node, zero: Argument, dtype: torch.dtype) -> Factor | Miss | None:
    """Return what is subtracted from a cast weight, if it is one constant integer."""
    found = zero_factor(weight, zero, (1,) * len(shape_of(weight)), dtype)
    if isinstance(found, Factor) and found.value is None:
        text = "the zero point is computed at run time"
        return Miss(MissCode.NOT_CONSTANT, found.home, text)
    return found
