"""The fused ops of an activation and a weight, which share operands and epilogue."""

from __future__ import annotations

from qfuse.ir.ops.convolution import FusedConvolution, as_fused_convolution
from qfuse.ir.ops.linear import FusedLinear, as_fused_linear

FusedProduct = FusedLinear | FusedConvolution


def as_fused_product(value: object) -> FusedProduct | None:
    """View ``value`` as a fused linear or convolution, or ``None``."""
    return as_fused_linear(value) or as_fused_convolution(value)


def kind_of(product: FusedProduct) -> str:
    """Return what a message calls the op: ``linear`` or ``convolution``."""
    return "linear" if isinstance(product, FusedLinear) else "convolution"
