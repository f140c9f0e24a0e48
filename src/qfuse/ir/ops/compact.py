"""The compact form of quantization parameters: one-dimensional, along a named axis."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.views import QuantParams, shape_of
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import same_size


@dataclass(frozen=True, slots=True)
class CompactParams:
    """Scales and zero points along one axis, as many accelerators take them.

    Attributes:
        scale: ``[blocks]``.
        zero_point: ``[blocks]``, or ``None``.
        axis: The axis along which the blocks lie; not negative.
        group: Elements along the axis that share a scale; ``None`` is the whole axis, with a single
            scale for the tensor. The last group may be partial.
    """

    scale: torch.Tensor
    zero_point: torch.Tensor | None
    axis: int
    group: int | None


def compact_params(params: QuantParams, axis: int) -> CompactParams | Refusal:
    """Return scale and zero point in one dimension, along ``axis``.

    The tensors are views of the graph's constants where these are stored: no node is added, nothing
    is copied and nothing is computed when the model runs.

    Refuses: scales that vary along another axis, or along two; scales of two levels; parameters
    that are computed at run time.

    Args:
        params: The parameters of a value.
        axis: The axis of the value that scales may vary along; a negative one counts from the end.

    Raises:
        IndexError: The value has no such axis.
    """
    rank = params.spec.rank
    if not -rank <= axis < rank:
        raise IndexError(f"a value with {rank} axes has no axis {axis}")
    axis %= rank
    if params.outer_scale is not None:
        return Refusal("the scale has a second level")
    # One entry per block: an axis with a single block is not split.
    split = [i for i, count in enumerate(shape_of(params.scale)) if not same_size(count, 1)]
    if len(split) > 1:
        return Refusal(f"scales vary along the axes {', '.join(map(str, split))}")
    if split and split != [axis]:
        return Refusal(f"scales vary along axis {split[0]}, not {axis}")
    scale = constant_value(params.scale)
    zero = None if params.zero_point is None else constant_value(params.zero_point)
    if scale is None or (zero is None and params.zero_point is not None):
        return Refusal("its scale or zero point is computed at run time")
    flat = None if zero is None else zero.reshape(-1)
    return CompactParams(scale.reshape(-1), flat, axis, params.spec.block[axis] if split else None)
