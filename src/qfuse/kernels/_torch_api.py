"""The only place of this package that uses private names of torch."""

from __future__ import annotations

import torch
from torch._prims_common import suggest_memory_format as _suggest_memory_format


def memory_format_of(x: torch.Tensor) -> torch.memory_format:
    """Return the memory format that torch gives to results of ``x``, by its strides."""
    return _suggest_memory_format(x)
