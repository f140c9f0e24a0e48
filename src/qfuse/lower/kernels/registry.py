"""The kernel registry; its order breaks ties in predicted time."""

from __future__ import annotations

from typing import Any

from qfuse.kernels import KernelLibrary
from qfuse.lower.kernels.activation_quantized import ActivationQuantized
from qfuse.lower.kernels.aten_int_mm import IntMM
from qfuse.lower.kernels.aten_weight_int8pack import WeightInt8Pack
from qfuse.lower.kernels.convolution_depthwise import ConvolutionDepthwise
from qfuse.lower.kernels.convolution_grouped import ConvolutionGrouped
from qfuse.lower.kernels.convolution_w4a16 import ConvolutionW4A16
from qfuse.lower.kernels.convolution_w8a8 import ConvolutionW8A8
from qfuse.lower.kernels.convolution_w8a16 import ConvolutionW8A16
from qfuse.lower.kernels.image_activation import ImageActivationQuantized
from qfuse.lower.kernels.layer_norm_quantized import LayerNormQuantized
from qfuse.lower.kernels.linear_grouped import LinearGrouped
from qfuse.lower.kernels.linear_w4a16 import LinearW4A16
from qfuse.lower.kernels.linear_w8a8 import LinearW8A8
from qfuse.lower.kernels.linear_w8a16 import LinearW8A16
from qfuse.lower.kernels.linear_w16a32 import LinearW16A32
from qfuse.lower.kernels.matmul_a8a8 import MatmulA8A8
from qfuse.lower.kernels.rms_norm_quantized import RmsNormQuantized
from qfuse.lower.operands.packing import Packer
from qfuse.lower.problems.span import LINEAR
from qfuse.lower.select.kernel import Kernel


def all_kernels(library: KernelLibrary) -> tuple[Kernel[Any], ...]:
    """Return new kernels for one lowering: they cache packed weights."""
    # One packer for all, so that two kernels with the same layout share a packed weight.
    packer = Packer()
    return (
        LinearW8A8(library, packer),
        LinearGrouped(library, packer, 4),
        LinearGrouped(library, packer, 8),
        LinearW4A16(library, packer),
        LinearW8A16(library, packer),
        LinearW16A32(library, packer),
        # The only ones for linears where there is no compiler.
        IntMM(packer),
        WeightInt8Pack(packer),
        ConvolutionW8A8(library, packer),
        ConvolutionDepthwise(library, packer),
        ConvolutionGrouped(library, packer),
        ConvolutionW4A16(library, packer),
        ConvolutionW8A16(library, packer),
        MatmulA8A8(library),
        RmsNormQuantized(library),
        LayerNormQuantized(library),
        ActivationQuantized(library),
        ImageActivationQuantized(library),
    )


def linear_kernels(library: KernelLibrary) -> tuple[Kernel[Any], ...]:
    """Return the kernels that cover a linear alone."""
    return tuple(kernel for kernel in all_kernels(library) if LINEAR in kernel.covers)
