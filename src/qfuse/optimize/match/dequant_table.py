"""Dequantization tables: proofs by enumerating all quantized values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qfuse.ir.ops.constants import constant_params, constant_value
from qfuse.ir.ops.views import QuantParams
from qfuse.ir.quant.reference import dequantize as dequantize_reference
from qfuse.ir.quant.spec import dtype_name, dtype_range
from qfuse.rewrite.prelude import Miss, MissCode

# A table of int32 would have 4 billion rows, and the
# bits of float8 are not in the order of their values.
_TABULATED = (torch.int8, torch.uint8, torch.int16)
# 16 MB of float32: 64 blocks of int16, or 16384 of int8.
_LIMIT = 1 << 22


@dataclass(frozen=True, slots=True)
class Table:
    """The float values of a dequantize.

    Attributes:
        low: The smallest quantized value of the dtype.
        high: The largest quantized value.
        float_values: The float value of each, ascending, per block:
            ``[high - low + 1, blocks]``.
    """

    low: int
    high: int
    float_values: torch.Tensor


def known_params(params: QuantParams) -> tuple[torch.Tensor, torch.Tensor | None] | Miss:
    """Return scale and zero point; refuse those that are computed at run time."""
    known = constant_params(params)
    if known is not None:
        return known
    text = "the scale or the zero point is computed at run time"
    known_scale = constant_value(params.scale) is not None
    at = params.zero_point if known_scale and params.zero_point is not None else params.scale
    return Miss(MissCode.NOT_CONSTANT, at, text, progress=3)


def table_of(params: QuantParams) -> Table | Miss:
    """Return the dequantization table if it is monotonic.

    NaN and negative zero are refused: torch does not define which of two zeros is greater.
    """
    spec = params.spec
    if spec.dtype not in _TABULATED:
        text = "{} has too many values to enumerate, or no order that ops keep"
        return Miss(MissCode.DTYPE, params.scale, text, dtype_name(spec.dtype), progress=3)
    if not spec.is_plain:
        text = "scales with a special format or two levels are not tabulated"
        return Miss(MissCode.GRANULARITY, params.scale, text, progress=3)
    known = known_params(params)
    if isinstance(known, Miss):
        return known
    scale, zero = known
    # All of the dtype, since dequantize does not clamp to the range of the spec.
    low, high = dtype_range(spec.dtype)
    count = high - low + 1
    if count * scale.numel() > _LIMIT:
        text = "{} blocks are too many to enumerate every value of"
        return Miss(MissCode.GRANULARITY, params.scale, text, scale.numel(), progress=3)
    # In int32 first: 128, the end of the range of int8, is not an int8.
    codes = torch.arange(low, high + 1, dtype=torch.int32, device=scale.device).to(spec.dtype)
    float_values = dequantize_reference(
        codes[:, None].expand(count, scale.numel()),
        scale.reshape(1, -1),
        None if zero is None else zero.reshape(1, -1),
        spec.with_block((None, 1)),
    )
    ordered = bool((float_values[1:] >= float_values[:-1]).all()) and not bool(
        float_values.isnan().any()
    )
    negative_zero = bool(((float_values == 0) & torch.signbit(float_values)).any())
    if not ordered or negative_zero:
        text = "larger quantized values do not always represent larger float values"
        return Miss(MissCode.RANGE, params.scale, text, progress=3)
    return Table(low, high, float_values)
