"""All families of the kernels' benchmark: kernels of qfuse beside ops that compute the same."""

from __future__ import annotations

from types import MappingProxyType

from qfuse.bench import kernel_families4, kernel_families8

__all__ = ["FAMILIES"]

FAMILIES = MappingProxyType({**kernel_families8.FAMILIES, **kernel_families4.FAMILIES})
"""By name."""
