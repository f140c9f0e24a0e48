"""Compile-time value ranges of zero points, quantized values and positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from qfuse.ir.aten import aten
from qfuse.ir.dtypes import exact_integers
from qfuse.ir.graph.schema import arguments, is_call
from qfuse.ir.graph.stage_graph import ASSUMED_META
from qfuse.ir.ops.constants import constant_value, number_of
from qfuse.ir.ops.library import output_of, stored_spec
from qfuse.ir.ops.qdq import as_choose
from qfuse.ir.ops.view_ops import RESHAPES
from qfuse.ir.ops.views import dtype_of, node_of, result_of
from qfuse.ir.quant.choose import ChooseSpec, fixed_zero_point

Bounds = tuple[int, int]

# Bounds the walk up from a zero point.
_DEPTH = 12

_SAME_VALUES = (
    *RESHAPES,
    aten.expand.default,
    aten.clone.default,
    aten._to_copy.default,
)
_ROUNDINGS = (aten.round.default, aten.floor.default, aten.ceil.default, aten.trunc.default)
_INT32 = torch.iinfo(torch.int32)
_SHIFTS = (aten.add.Tensor, aten.sub.Tensor)
# `rsub` is the second operand minus the first.
_NEGATIONS = (aten.neg.default, aten.rsub.Scalar)
_ARANGES = (aten.arange.default, aten.arange.start)
_CLAMPS = (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default)
_ZEROS = (aten.zeros_like.default, aten.zeros.default, aten.new_zeros.default)
_FULLS = (aten.full_like.default, aten.full.default, aten.new_full.default)


def is_zero(node: Node) -> bool:
    """Whether every element of ``node`` is known to be zero."""
    value = constant_value(node)
    if value is not None:
        # A negative zero does not count: -0.0 - (-0.0) is 0.0.
        return not bool(value.any()) and not bool(torch.signbit(value).any())
    if is_call(node, *_SAME_VALUES):
        return is_zero(node_of(arguments(node)["self"]))
    if is_call(node, *_ZEROS):
        return True
    if is_call(node, *_FULLS):
        fill = arguments(node)["fill_value"]
        return isinstance(fill, (int, float)) and fill == 0 and math.copysign(1, fill) == 1
    chosen = _choice_of_zero_point(node)
    return chosen is not None and fixed_zero_point(chosen) == 0


def bounds_of(node: Node, *, look: bool = True) -> Bounds | None:
    """Return integer bounds on every element of ``node``; ``None`` if they are unknown.

    Conversions from NaN are ignored: their result is an arbitrary integer.

    Args:
        node: Quantized values, a zero point or positions. Bounds are unknown if elements may be
            fractional.
        look: Use the values of constants and the producing ops; otherwise only the dtype, which
            is cheap.
    """
    dtype = dtype_of(node)
    if dtype is torch.bool:
        return None
    found = _range_of(node, _DEPTH if look else 0)
    if not found.whole or math.inf in {-found.low, found.high}:
        return None
    return int(found.low), int(found.high)


def fits_int32(zero: Node) -> bool:
    """Whether a zero point is an integer of at most 32 bits."""
    bounds = None if dtype_of(zero).is_floating_point else bounds_of(zero)
    return bounds is not None and _INT32.min <= bounds[0] and bounds[1] <= _INT32.max


@dataclass(frozen=True, slots=True)
class _Range:
    """The range of a tensor's elements, with integer or infinite bounds.

    Attributes:
        low: An integer, or minus infinity.
        high: An integer, or infinity.
        whole: Whether all elements are integers.
    """

    low: float
    high: float
    whole: bool


# A zero point without data (meta) is assumed to be in the valid range of zero points.
_ASSUMED = _Range(-(1 << 15), (1 << 15) - 1, whole=True)
_ANYWHERE = _Range(-math.inf, math.inf, whole=False)


def _range_of(node: Node, depth: int) -> _Range:
    dtype = dtype_of(node)
    if dtype.is_complex:
        return _ANYWHERE
    least, most = exact_integers(dtype)
    found = _found_range(node, depth) if depth else None
    if found is not None:
        # Bounds that the dtype can represent survive rounding to it, and nothing wraps.
        open_ends = dtype.is_floating_point
        fits_low = least <= found.low or (open_ends and found.low == -math.inf)
        if fits_low and (found.high <= most or (open_ends and found.high == math.inf)):
            return replace(found, whole=found.whole or not open_ends)
    return _ANYWHERE if dtype.is_floating_point else _Range(least, most, whole=True)


def _found_range(node: Node, depth: int) -> _Range | None:
    """Return the range of the elements before they are converted to the dtype of ``node``."""
    # Only graphs without values have such constants, and only if the caller asked for it.
    assumed = node.op == "get_attr" and ASSUMED_META in node.meta
    if assumed or is_zero(node):
        return _ASSUMED if assumed else _Range(0, 0, whole=True)
    value = constant_value(node)
    if value is not None:
        return _range_of_constant(value)
    if is_call(node, *_SAME_VALUES, *_ROUNDINGS):
        # The bounds are integers, so rounding to an integer stays within them.
        inner = _range_of(node_of(arguments(node)["self"]), depth - 1)
        return replace(inner, whole=inner.whole or is_call(node, *_ROUNDINGS))
    if is_call(node, *_CLAMPS):
        return _clamped(node, depth)
    if is_call(node, *_SHIFTS, *_NEGATIONS):
        return _shifted(node, depth)
    return _range_of_arange(node) if is_call(node, *_ARANGES) else _range_of_quantized(node)


def _range_of_constant(value: torch.Tensor) -> _Range | None:
    # A float constant may hold fractions.
    if value.dtype.is_floating_point or value.dtype is torch.bool:
        return None
    if value.numel() == 0:
        return _Range(0, 0, whole=True)
    low, high = torch.aminmax(value)
    return _Range(int(low), int(high), whole=True)


def _range_of_arange(node: Node) -> _Range | None:
    """Return the range of integer positions, whose end may be dynamic."""
    a = arguments(node)
    start, end = a.get("start", 0), a["end"]
    if not isinstance(start, int) or isinstance(end, float):
        return None
    if isinstance(end, int):
        return _Range(start, max(start, end - 1), whole=True)
    # No size is large enough for positions to wrap in 32 bits; in 8 or 16 they may.
    dtype = dtype_of(node)
    wide = dtype in {torch.int32, torch.int64}
    return _Range(start, exact_integers(dtype)[1], whole=True) if wide else None


def _clamped(node: Node, depth: int) -> _Range | None:
    """Return the range of a clamp; as in torch, the upper bound is applied last."""
    a = arguments(node)
    inner = _range_of(node_of(a["self"]), depth - 1)
    bounds = []
    for bound, default in ((a.get("min"), -math.inf), (a.get("max"), math.inf)):
        # A bound that is a node has no known value, and a NaN bound makes every element NaN.
        if bound is not None and (not isinstance(bound, (int, float)) or bound != bound):  # noqa: PLR0124
            return None
        bounds.append(default if bound is None else bound)
    least_kept, most_kept = exact_integers(dtype_of(node))
    if not dtype_of(node).is_floating_point and not all(
        math.isinf(b) or least_kept <= b <= most_kept for b in bounds
    ):
        # A bound that the dtype cannot represent is converted to it, which changes its value.
        return None
    low, high = bounds
    whole = inner.whole and all(math.isinf(b) or b == int(b) for b in bounds)
    least = min(max(inner.low, low), high)
    most = min(max(inner.high, low), high)
    return _Range(_integer(math.floor, least), _integer(math.ceil, most), whole)


def _shifted(node: Node, depth: int) -> _Range | None:
    """Return the range of a sum or difference with a known integer, or of a negation."""
    a = arguments(node)
    by = number_of(a["other"]) if "other" in a else 0
    if by is None or not math.isfinite(by) or by != int(by) or a.get("alpha", 1) != 1:
        return None
    inner = _range_of(node_of(a["self"]), depth - 1)
    if is_call(node, *_NEGATIONS):
        return _Range(int(by) - inner.high, int(by) - inner.low, inner.whole)
    by = int(by) if is_call(node, aten.add.Tensor) else -int(by)
    return _Range(inner.low + by, inner.high + by, inner.whole)


def _range_of_quantized(node: Node) -> _Range | None:
    """Return the range of quantized values, or of a dynamic zero point for them."""
    codes = stored_spec(node)
    # Quantize clamps to its range.
    if codes is not None:
        return _Range(codes.quant_min, codes.quant_max, whole=not codes.dtype.is_floating_point)
    spec = _choice_of_zero_point(node)
    if spec is None:
        return None
    fixed = fixed_zero_point(spec)
    low, high = (spec.quant_min, spec.quant_max) if fixed is None else (fixed, fixed)
    # The zero point of an empty tensor is zero.
    return _Range(min(low, 0), max(high, 0), whole=True)


def _integer(rounded: Callable[[float], int], value: float) -> float:
    return value if math.isinf(value) else rounded(value)


def _choice_of_zero_point(node: Node) -> ChooseSpec | None:
    """Return the choose_qparams spec whose zero point is ``node``."""
    result = result_of(node)
    if result is None:
        return None
    op, index = result
    if (choose := as_choose(op)) is not None:
        return choose.spec if index == 1 else None
    output = output_of(op)
    return None if output is None or index != 2 else output.choose  # noqa: PLR2004
