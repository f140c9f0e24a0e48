"""The rows of the kernel table, in the order that breaks ties."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qfuse.lower.grouped import LinearGrouped
from qfuse.lower.int_mm import IntMM
from qfuse.lower.packing import Packer
from qfuse.lower.real_weights import RealWeights
from qfuse.lower.w4a16 import LinearW4A16
from qfuse.lower.w8a8 import LinearW8A8
from qfuse.lower.w8a16 import LinearW8A16
from qfuse.lower.weight_only import WeightInt8Pack

if TYPE_CHECKING:
    from qfuse.kernels import KernelLibrary
    from qfuse.lower.kernel import LinearKernel

__all__ = ["kernel_rows"]


def kernel_rows(library: KernelLibrary) -> tuple[LinearKernel, ...]:
    """Return the rows, made anew for one lowering: they remember what they packed."""
    packer = Packer()
    weights = RealWeights(packer)
    return (
        LinearW8A8(library, packer),
        LinearGrouped(library, packer, 4),
        LinearGrouped(library, packer, 8),
        LinearW4A16(library, weights),
        LinearW8A16(library, weights),
        IntMM(packer),
        WeightInt8Pack(packer),
    )
