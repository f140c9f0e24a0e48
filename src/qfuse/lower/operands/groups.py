"""Weights with scales per group of input features, in the layout of the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.views import QuantParams
from qfuse.ir.quant.block import is_per_input
from qfuse.ir.quant.reference import expand_blocks
from qfuse.ir.quant.spec import QuantSpec, ZeroPointDomain
from qfuse.ir.refusal import Refusal
from qfuse.kernels.weight_only import GROUP_MULTIPLE

_CODES = 16

PER_INPUT = (
    "the weight's scales run along the input features, one each: "
    "kernels take one per output feature"
)


def first_value(stored: torch.Tensor, spec: QuantSpec) -> int:
    """Return the least quantized value of a weight, or of its range if that fits four bits.

    A symmetric range such as [-7, 7] is extended downwards, so that its zero point is in the middle
    of the 4-bit values.
    """
    least = spec.quant_min
    if spec.quant_max - least == _CODES - 2 and least == -spec.quant_max:
        least -= 1
    if stored.numel() == 0:
        return least
    low, high = map(int, stored.aminmax())
    return least if least <= low and high < least + _CODES else low


def check_four_bits(stored: torch.Tensor) -> Refusal | None:
    """Refuse a weight whose quantized values do not lie within 16 consecutive integers."""
    if not stored.dtype.is_floating_point:
        low, high = map(int, stored.aminmax()) if stored.numel() else (0, 0)
        if high - low < _CODES:
            return None
    return Refusal("the weight's values span more than 15, which does not fit four bits")


def group_count(spec: QuantSpec, k: int) -> int | Refusal:
    """Return the number of groups of ``k`` input features, or refuse unsupported group sizes."""
    size = spec.block[1]
    # A group as long as the axis, or longer, is one scale per row.
    if size is None or (size >= k > 0):
        return 1
    if k == 0:
        return Refusal("the weight is scaled in groups of no input features")
    if size % GROUP_MULTIPLE or k % size:
        if is_per_input(spec.block):
            return Refusal(f"{PER_INPUT} or per group of a multiple of {GROUP_MULTIPLE} inputs")
        blocks = f"the weight is scaled in blocks of {spec.block_text()}"
        return Refusal(f"{blocks}: groups must be whole, of a multiple of {GROUP_MULTIPLE}")
    return k // size


def group_scales(params: QuantParams, shape: Sequence[int]) -> torch.Tensor:
    """Return the constant scales as float32 ``[groups, N]``, rounded as in the source."""
    value = constant_of(params.scale)
    assert value is not None, f"not a constant: {params.scale.format_node()}"
    return per_group(value.to(params.spec.arithmetic.compute).to(torch.float32), params.spec, shape)


def group_zero_points(params: QuantParams, shape: Sequence[int]) -> torch.Tensor:
    """Return the constant integer zero points as int32 ``[groups, N]``; zeros if there are none.

    With float zero points this is the middle of the range, an integer: see ``middle_of``.
    """
    grid = tuple(map(int, params.spec.grid(shape)))
    if params.zero_point is None:
        value = torch.zeros(grid, dtype=torch.int32)
    elif params.spec.domain is ZeroPointDomain.FLOAT_OFFSET:
        value = torch.full(grid, int(middle_of(params.spec)), dtype=torch.int32)
    else:
        found = constant_of(params.zero_point)
        assert found is not None, f"not a constant: {params.zero_point.format_node()}"
        value = found.to(torch.int32)
    return per_group(value, params.spec, shape)


def middle_of(spec: QuantSpec) -> float:
    """Return the value to subtract from quantized values if zero points are float offsets."""
    return (spec.quant_max + spec.quant_min + 1) / 2


def group_offsets(params: QuantParams, shape: Sequence[int]) -> torch.Tensor | None:
    """Return constant float zero points as float32 ``[groups, N]``, rounded as in the source."""
    if params.zero_point is None or params.spec.domain is not ZeroPointDomain.FLOAT_OFFSET:
        return None
    value = constant_of(params.zero_point)
    assert value is not None, f"not a constant: {params.zero_point.format_node()}"
    return per_group(value.to(params.spec.arithmetic.compute).to(torch.float32), params.spec, shape)


def per_group(values: torch.Tensor, spec: QuantSpec, shape: Sequence[int]) -> torch.Tensor:
    """Return one value per block of a weight ``[N, K]`` as ``[groups, N]``, contiguous."""
    rows = expand_blocks(values.detach(), (spec.block[0], None), shape)
    return rows.expand(shape[0], values.shape[1]).t().contiguous()
