"""A choice of scales written as arithmetic: the greatest magnitude, clamped and divided."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import Quantize, as_quantize
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.ir.quant.spec import dtype_name
from qfuse.ir.sizes import same_size
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

# The reference gives a scale of float16 in float32.
_FLOATS = (torch.float32, torch.bfloat16, torch.float64)
_CLAMPS = (aten.clamp.default, aten.clamp_min.default)


@dataclass(frozen=True, slots=True)
class ChooseChainSite:
    """The quotient that ends a chain, and what it chooses."""

    node: Node
    x: Node
    spec: ChooseSpec


class ChooseChain(Rule[ChooseChainSite]):
    """``amax(abs(x), -1, keepdim).clamp(min=eps) / quant_max`` becomes ``choose_qparams``.

    Before::

        x -> abs -> amax(-1) -> clamp(min=1e-5) -> div(127) -> scale
        x, scale -> quantize int8[-128,127]

    After::

        x -> choose_qparams "token-symmetric int8[-128,127] ..." -> scale
        x, scale -> quantize int8[-128,127]

    Exact: the greatest magnitude is that of the least or that of the greatest element, and the rest
    is the same operations in the same type. It is a choice only where ``x`` is quantized with it.

    Refuses: a scale that is computed otherwise, or from other data than is quantized; another
    divisor than the greatest stored number; a range that is not symmetric, but for one more below;
    a zero point; a clamp with an upper bound, or whose least scale is not positive and finite; a
    greatest magnitude of anything but whole rows; float16, which the reference leaves for float32.
    """

    name = "choose-chain"
    anchors: ClassVar[tuple[OpOverload, ...]] = (ops.quantize,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> ChooseChainSite | Miss:
        """Match a quantize whose scale is computed from what it quantizes."""
        quantize = as_quantize(node)
        assert quantize is not None, "the anchor is a quantize"
        scale = quantize.params.scale
        if not is_call(scale, aten.div.Tensor):
            return Miss(MissCode.PATTERN, scale, "its scale is no quotient", progress=0)
        clamped, divisor = arguments(scale)["self"], arguments(scale)["other"]
        if not isinstance(clamped, Node) or not is_call(clamped, *_CLAMPS):
            text = "what its scale divides has no least value, as clamp(min=...) gives one"
            return Miss(MissCode.PATTERN, scale, text)
        peak = arguments(clamped)["self"]
        if not isinstance(peak, Node) or not is_call(peak, aten.amax.default):
            text = "its scale is not computed from the greatest magnitude of a row"
            return Miss(MissCode.PATTERN, clamped, text)
        eps = _least(clamped)
        if isinstance(eps, Miss):
            return eps
        refused = _refuse_peak(quantize, peak) or _refuse_range(quantize, scale, divisor)
        return refused or ChooseChainSite(scale, quantize.x, _spec(quantize, eps))

    def rewrite(self, site: ChooseChainSite, rw: Rewriter) -> None:
        """Choose where the scale was computed."""
        with rw.before(site.node):
            pair = rw.call(ops.choose_qparams, site.x, str(site.spec))
            scale = rw.item(pair, 0)
        rw.replace(site.node, scale)


def _least(clamped: Node) -> float | Miss:
    """Return the least value that a clamp leaves."""
    a = arguments(clamped)
    least, most = a["min"], a.get("max")
    if most is not None:
        text = "the greatest magnitude is clamped from above too"
        return Miss(MissCode.ARGUMENT, clamped, text, progress=2)
    # Below the normal numbers of float32 it may be rounded on the way to a kernel.
    known = isinstance(least, (int, float)) and not isinstance(least, bool)
    tiny = torch.finfo(torch.float32).tiny
    if not known or not isinstance(least, (int, float)) or not tiny <= least < math.inf:
        text = "the least of the greatest magnitude is {}, which is no positive number"
        return Miss(MissCode.ARGUMENT, clamped, text, least, progress=2)
    return float(least)


def _refuse_peak(quantize: Quantize, peak: Node) -> Miss | None:
    """Refuse what is not the greatest magnitude of every row of what is quantized."""
    a = arguments(peak)
    x, shape = quantize.x, shape_of(quantize.x)
    if not is_call(a["self"], aten.abs.default):
        text = "its scale is computed from the greatest element, not from the greatest magnitude"
        return Miss(MissCode.PATTERN, peak, text, progress=2)
    of = a["self"]
    assert isinstance(of, Node), "it is a call"
    if arguments(of)["self"] is not x:
        text = "its scale is computed from other data than is quantized with it"
        return Miss(MissCode.PATTERN, of, text, progress=2)
    dims = a["dim"]
    dims = tuple(dims) if isinstance(dims, (list, tuple)) else (dims,)
    if dims not in {(-1,), (len(shape) - 1,)} or a["keepdim"] is not True:
        text = "the greatest magnitude is that of axes {} with keepdim={}, not of the last one"
        return Miss(MissCode.GRANULARITY, peak, text, dims, a["keepdim"], progress=2)
    if dtype_of(x) not in _FLOATS:
        text = "scales computed in {} are not those that are chosen for it"
        return Miss(MissCode.DTYPE, x, text, dtype_name(dtype_of(x)), progress=2)
    return None


def _refuse_range(quantize: Quantize, scale: Node, divisor: object) -> Miss | None:
    """Refuse a quantize that the scale is not for."""
    spec = quantize.params.spec
    if quantize.params.zero_point is not None or quantize.params.outer_scale is not None:
        text = "it is quantized with a zero point or a second scale, which nothing has chosen"
        return Miss(MissCode.ZERO_POINT, quantize.node, text, progress=2)
    top = spec.quant_max
    if spec.dtype is not torch.int8 or top <= 0 or spec.quant_min not in {-top, -top - 1}:
        text = "the range {} to {} of {} is not symmetric"
        told = spec.quant_min, top, dtype_name(spec.dtype)
        return Miss(MissCode.RANGE, quantize.node, text, *told, progress=2)
    if isinstance(divisor, bool) or not isinstance(divisor, (int, float)) or divisor != top:
        text = "its scale divides by {}, and the greatest stored number is {}"
        return Miss(MissCode.RANGE, scale, text, divisor, top, progress=2)
    sizes = zip(shape_of(quantize.x)[:-1], spec.block[:-1], strict=True)
    rows = all(block == 1 or same_size(size, 1) for size, block in sizes)
    if not rows or dtype_of(scale) != dtype_of(quantize.x):
        text = "it is not quantized by rows"
        return Miss(MissCode.GRANULARITY, quantize.node, text, progress=2)
    return None


def _spec(quantize: Quantize, eps: float) -> ChooseSpec:
    spec, real = quantize.params.spec, dtype_of(quantize.x)
    bounds = spec.quant_min, spec.quant_max
    return ChooseSpec(Formula.TOKEN_SYMMETRIC, spec.dtype, *bounds, spec.block, eps, real, real)
