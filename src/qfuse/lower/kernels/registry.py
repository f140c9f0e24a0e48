"""The rows of the kernel table, in the order that breaks ties."""

from __future__ import annotations

from qfuse.kernels import KernelLibrary
from qfuse.lower.kernel.packing import Packer
from qfuse.lower.kernel.protocol import LinearKernel
from qfuse.lower.kernel.weight_only_operands import RealWeights
from qfuse.lower.kernels.aten_int_mm import IntMM
from qfuse.lower.kernels.aten_weight_int8pack import WeightInt8Pack
from qfuse.lower.kernels.linear_grouped import LinearGrouped
from qfuse.lower.kernels.linear_w4a16 import LinearW4A16
from qfuse.lower.kernels.linear_w8a8 import LinearW8A8
from qfuse.lower.kernels.linear_w8a16 import LinearW8A16


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
