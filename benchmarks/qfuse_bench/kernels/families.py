"""All families of the kernels' benchmark: kernels of qfuse beside ops that compute the same."""

from __future__ import annotations

from types import MappingProxyType

from qfuse_bench.kernels import families_int4 as kernel_families4
from qfuse_bench.kernels import families_int8 as kernel_families8

FAMILIES = MappingProxyType({**kernel_families8.FAMILIES, **kernel_families4.FAMILIES})
"""By name."""
