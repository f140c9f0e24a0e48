"""Comparing values before and after a phase."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def bits_same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    """Whether two lists of tensors are equal in dtype, shape and every element."""
    return len(a) == len(b) and all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True)
    )
