"""Merges groups of channels of an int8 convolution whose output channels do not fill a vector.

Several adjacent groups become one, with the weight zero between the channels of different groups.
That multiplies no more vectors as long as the output channels still fit into one, and copies,
multiplies and finishes fewer and longer rows.
"""

from __future__ import annotations

import torch

from qfuse.kernels.accumulator import MOST_PRODUCTS_WITH_ZERO

_LANES = 16


def groups_to_merge(groups: int, features: int, k: int) -> int:
    """Return how many groups to merge into one.

    Args:
        groups: Groups of channels.
        features: Output channels of a group.
        k: Products per output element.

    Returns:
        The greatest divisor of ``groups`` whose output channels fit into a vector, and whose sums
        into int32.
    """
    most = min(_LANES // max(features, 1), MOST_PRODUCTS_WITH_ZERO // max(k, 1), groups)
    return max(by for by in range(1, max(most, 1) + 1) if groups % by == 0)


def merge_groups(
    weight: torch.Tensor, zero_point: torch.Tensor | None, groups: int, by: int
) -> torch.Tensor:
    """Merge groups of the weight of a convolution.

    Args:
        weight: int8 ``[N, C / groups, *kernel]``.
        zero_point: ``[N]``, in the range of int8; ``None`` means 0.
        groups: Groups of channels.
        by: How many become one; divides ``groups``.

    Returns:
        int8 ``[N, by * C / groups, *kernel]``, the weight of ``groups / by`` groups.
    """
    n = weight.shape[0]
    fill = torch.zeros(n) if zero_point is None else zero_point
    return _spread(weight, fill.reshape(n, *[1] * weight.dim()), groups, by)


def merge_transposed_groups(
    weight: torch.Tensor, zero_point: torch.Tensor | None, groups: int, by: int
) -> torch.Tensor:
    """Merge groups of the weight of a transposed convolution.

    Args:
        weight: int8 ``[C, N / groups, *kernel]``.
        zero_point: ``[N]``, the same in every group; ``None`` means 0.
        groups: Groups of channels.
        by: How many become one; divides ``groups``.

    Returns:
        int8 ``[C, by * N / groups, *kernel]``, the weight of ``groups / by`` groups.
    """
    features = weight.shape[1]
    fill = torch.zeros(features) if zero_point is None else zero_point[:features]
    return _spread(weight, fill.reshape(1, 1, -1, *[1] * (weight.dim() - 2)), groups, by)


def _spread(weight: torch.Tensor, fill: torch.Tensor, groups: int, by: int) -> torch.Tensor:
    """Return every row of ``weight`` among ``by`` slots, at that of its group."""
    rows = weight.shape[0]
    wide = fill.to(weight.dtype).expand(rows, by, *weight.shape[1:]).clone()
    index = torch.arange(rows)
    wide[index, index // (rows // groups) % by] = weight
    return wide.flatten(1, 2)
