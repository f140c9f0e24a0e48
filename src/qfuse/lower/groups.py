"""Weights that are scaled in groups along their input features, as kernels read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from qfuse.ir.program import constant_of
from qfuse.ir.quant_math import expand_blocks
from qfuse.lower.kernel import Refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qfuse.ir.quant_spec import QuantSpec
    from qfuse.ir.views import QuantParams

__all__ = [
    "first_code",
    "fits_four_bits",
    "group_count",
    "group_scales",
    "group_zero_points",
    "per_group",
]

_CODES = 16
# Kernels take weights apart in pieces of this many input features.
_GROUP_MULTIPLE = 8


def first_code(stored: torch.Tensor, spec: QuantSpec) -> int:
    """Return the least number that a weight stores, or may store if all fit four bits from there.

    A symmetric range such as [-7, 7] is taken with the room below it, so that its zero point is in
    the middle of the codes.
    """
    least = spec.quant_min
    if spec.quant_max - least == _CODES - 2 and least == -spec.quant_max:
        least -= 1
    if stored.numel() == 0:
        return least
    low, high = int(stored.min()), int(stored.max())
    return least if least <= low and high < least + _CODES else low


def fits_four_bits(stored: torch.Tensor) -> bool:
    """Whether a weight's numbers are no more than sixteen in a row. Nothing else is looked at."""
    if stored.dtype.is_floating_point:
        return False
    return stored.numel() == 0 or int(stored.max()) - int(stored.min()) < _CODES


def group_count(spec: QuantSpec, k: int) -> int | Refusal:
    """Return how many groups ``k`` input features fall into, or refuse groups kernels cannot take."""
    size = spec.block[1]
    if size is None or (size >= k > 0):
        return 1
    if k == 0:
        return Refusal("the weight is scaled in groups of no input features")
    if size % _GROUP_MULTIPLE or k % size:
        blocks = f"the weight is scaled in blocks of {spec.block_text()}"
        return Refusal(f"{blocks}: groups must be whole, of a multiple of {_GROUP_MULTIPLE}")
    return k // size


def group_scales(params: QuantParams, shape: Sequence[int]) -> torch.Tensor:
    """Return the constant scales as float32 ``[groups, N]``, rounded as the source rounds them."""
    value = constant_of(params.scale)
    assert value is not None, f"not a constant: {params.scale.format_node()}"
    return per_group(value.to(params.spec.arithmetic.compute).to(torch.float32), params.spec, shape)


def group_zero_points(params: QuantParams, shape: Sequence[int]) -> torch.Tensor:
    """Return the constant integer zero points as int32 ``[groups, N]``; zeros if there are none."""
    if params.zero_point is None:
        value = torch.zeros(tuple(map(int, params.spec.grid(shape))), dtype=torch.int32)
    else:
        found = constant_of(params.zero_point)
        assert found is not None, f"not a constant: {params.zero_point.format_node()}"
        value = found.to(torch.int32)
    return per_group(value, params.spec, shape)


def per_group(values: torch.Tensor, spec: QuantSpec, shape: Sequence[int]) -> torch.Tensor:
    """Return one value per block of a weight ``[N, K]`` as ``[groups, N]``, contiguous."""
    rows = expand_blocks(values.detach(), (spec.block[0], None), shape)
    return rows.expand(shape[0], values.shape[1]).t().contiguous()
