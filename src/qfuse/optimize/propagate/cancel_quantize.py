"""Cancel a quantize of a dequantize with the same parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from qfuse.ir.graph.alias import leaves_graph, memory_of
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.movement.registry import movement_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.library import stored_spec
from qfuse.ir.ops.qdq import Dequantize, Quantize
from qfuse.ir.ops.views import QuantParams, node_of, shape_of, tensor_of
from qfuse.ir.quant.block import same_grid
from qfuse.ir.quant.element import ScaleFormat
from qfuse.ir.quant.round_trip import RoundTripFailure, round_trip_failure
from qfuse.ir.quant.spec import QuantSpec, ZeroPointDomain, dtype_name, dtype_range
from qfuse.optimize.match.strides import refuse_layout
from qfuse.optimize.propagate.qdq_pair import quantize_pair
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

_WIDE = (torch.float32, torch.float64)
# `qfuse.ir.quant.round_trip` is a proof for at most 16 bits.
_NARROW_STORAGE = (torch.int8, torch.uint8, torch.int16)
# Bounds the search for the op that computed the quantized values.
_STEPS = 32


@dataclass(frozen=True, slots=True)
class CancelQuantizeSite:
    """A quantize and the dequantize that it inverts.

    Attributes:
        quantize: The quantize.
        dequantize: Its operand.
        cut: The range, if it may clip some of the quantized values.
        copies: Whether the caller gets the result, and may see the quantized values elsewhere too.
    """

    quantize: Quantize
    dequantize: Dequantize
    cut: tuple[int, int] | None
    copies: bool = False


class CancelQuantize(Rule[CancelQuantizeSite]):
    """``quantize(dequantize(q, s), s)`` is ``q``, or ``q`` clamped to the range.

    Before::

        q -> dequantize(s) -> quantize(s) -> ...

    After::

        q -> ...

    The round trip is exact under the conditions of :mod:`qfuse.ir.quant.round_trip`. Where some
    quantized values may lie outside the range, the range stays as a clamp.

    Refuses: different parameters; a scale that is computed at run time, which may be infinite;
    scales with which a factor or a product leaves the normal range of float32; a float dtype or
    arithmetic narrower than float32.
    """

    name = "cancel-quantize"
    anchors: ClassVar[tuple[OpOverload, ...]] = (ops.quantize,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> CancelQuantizeSite | Miss:
        """Match a quantize of a dequantize with equal parameters."""
        pair = quantize_pair(node)
        if isinstance(pair, Miss):
            return pair
        quantize, dequantize = pair
        new, old = quantize.params, dequantize.params
        wrong = (
            _refuse_spec(node, new.spec, old.spec)
            or _refuse_difference(quantize, new, old)
            or _refuse_numbers(new)
        )
        # Dequantize does not clamp: a quantized value of 200 is 200 again only if the range has it.
        cut = None if wrong else _cut(dequantize.q, new.spec)
        copies = cut is None and leaves_graph(node) and _is_visible(dequantize.q)
        moved = tensor_of(dequantize.q)
        with torch.no_grad():
            moved = torch.empty_like(moved) if copies else moved
        wrong = wrong or refuse_layout(node, moved, moves=False)
        return wrong or CancelQuantizeSite(quantize, dequantize, cut, copies)

    def rewrite(self, site: CancelQuantizeSite, rw: Rewriter) -> None:
        """Replace the quantize by the quantized values it started from."""
        q = site.dequantize.q
        if site.cut is not None:
            q = rw.call(aten.clamp.default, q, *site.cut)
        if site.copies:
            q = rw.call(aten.clone.default, q)
        rw.replace(site.quantize.node, q)


def _is_visible(q: Node) -> bool:
    """Whether the caller can see the memory of ``q``: an input, a constant, or an output."""
    owner = memory_of(q)
    return owner.op != "call_function" or leaves_graph(owner)


def _refuse_spec(node: Node, new: QuantSpec, old: QuantSpec) -> Miss | None:
    # float32 represents integers up to 2^24 only, so int32 values do not come back.
    if new.dtype != old.dtype or new.dtype not in _NARROW_STORAGE:
        text = "{} is dequantized, {} is quantized"
        return Miss(
            MissCode.DTYPE, node, text, dtype_name(old.dtype), dtype_name(new.dtype), progress=2
        )
    if {new.scale_format, old.scale_format} != {ScaleFormat.FLOAT} or new.outer or old.outer:
        text = "the scales have a special format or a second level"
        return Miss(MissCode.DTYPE, node, text, progress=2)
    if ZeroPointDomain.FLOAT_OFFSET in {new.domain, old.domain}:
        return Miss(MissCode.ZERO_POINT, node, "the zero point is a float", progress=2)
    # bfloat16 has 8 bits: with scale 1, an int16 of 257 comes back as 256.
    if new.float_dtype is not torch.float32 or old.float_dtype is not torch.float32:
        text = "the float values between the two are {}"
        return Miss(MissCode.DTYPE, node, text, dtype_name(old.float_dtype), progress=2)
    if {new.arithmetic.compute, old.arithmetic.compute} - set(_WIDE):
        text = "its arithmetic is narrower than float32"
        return Miss(MissCode.ARITHMETIC, node, text, progress=2)
    return None


def _refuse_difference(quantize: Quantize, new: QuantParams, old: QuantParams) -> Miss | None:
    same_block = same_grid(new.spec.block, old.spec.block, shape_of(quantize.x))
    if not same_block or not replace(old, spec=new.spec).same_as(new):
        text = "the two have different scales or zero points"
        return Miss(MissCode.GRANULARITY, quantize.node, text, progress=3)
    return None


def _refuse_numbers(params: QuantParams) -> Miss | None:
    """Refuse scales and zero points with which the round trip may not be exact."""
    scale = constant_of(params.scale)
    # A dynamic scale of NaN or infinity gives NaN for 0, which is quantized to anything.
    if scale is None or scale.is_meta:
        text = "the scale is computed at run time and may be infinite"
        return Miss(MissCode.NOT_CONSTANT, params.scale, text, progress=3)
    # A reciprocal is taken in the dtype of the scale: in bfloat16 it is off by up to 2^-9, which
    # moves 300 by more than half a step.
    if scale.dtype not in _WIDE:
        text = "the scale is {}"
        return Miss(MissCode.DTYPE, params.scale, text, dtype_name(scale.dtype), progress=3)
    zero = None
    if params.zero_point is not None:
        zero = constant_of(params.zero_point)
        if zero is None or zero.is_meta:
            text = "the zero point is computed at run time"
            return Miss(MissCode.NOT_CONSTANT, params.zero_point, text, progress=3)
    wrong = round_trip_failure(params.spec.dtype, scale, zero)
    if wrong is RoundTripFailure.ZERO_POINT:
        return Miss(MissCode.ZERO_POINT, node_of(params.zero_point), wrong.value, progress=3)
    return None if wrong is None else Miss(MissCode.RANGE, params.scale, wrong.value, progress=3)


def _cut(q: Node, spec: QuantSpec) -> tuple[int, int] | None:
    """Return the range of a spec, unless it holds all quantized values."""
    low, high = _bounds(q)
    # Otherwise the range may be a fused ReLU, which must still clip.
    inside = spec.quant_min <= low and high <= spec.quant_max
    return None if inside else (spec.quant_min, spec.quant_max)


def _bounds(q: Node) -> tuple[int, int]:
    """Return bounds of the quantized values, taken from the quantize that computes them."""
    # Movements do not change values, so the search goes up through them.
    widest = dtype_range(tensor_of(q).dtype)
    for _ in range(_STEPS):
        spec = stored_spec(q)
        if spec is not None:
            return spec.quant_min, spec.quant_max
        if is_call(q, aten.cat.default):
            joined = arguments(q)["tensors"]
            assert isinstance(joined, (list, tuple)), f"not a list: {q.format_node()}"
            parts = [stored_spec(node_of(part)) for part in joined]
            # A part without a known range may hold any value of the dtype.
            known = [p for p in parts if p is not None]
            if len(known) < len(parts) or not known:
                return widest
            return min(p.quant_min for p in known), max(p.quant_max for p in known)
        movement = movement_of(q)
        if movement is None:
            return widest
        q = movement.source
    return widest
