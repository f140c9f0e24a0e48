"""The fused products, which share operands and epilogue."""

from __future__ import annotations

from qfuse.ir.ops.convolution import FusedConvolution, as_fused_convolution
from qfuse.ir.ops.linear import FusedLinear, as_fused_linear
from qfuse.ir.ops.matmul import FusedMatmul, as_fused_matmul

WeightedProduct = FusedLinear | FusedConvolution
"""A product of an activation and a weight."""

FusedProduct = WeightedProduct | FusedMatmul


def as_fused_product(value: object) -> FusedProduct | None:
    """View ``value`` as a fused linear, convolution or matmul, or ``None``."""
    return as_fused_linear(value) or as_fused_convolution(value) or as_fused_matmul(value)


def kind_of(product: FusedProduct) -> str:
    """Return what a message calls the op: ``linear``, ``convolution`` or ``matmul``."""
    match product:
        case FusedLinear():
            return "linear"
        case FusedConvolution():
            return "convolution"
        case FusedMatmul():
            return "matmul"
