"""The ops that a kernel fuses."""

from __future__ import annotations

from typing import Any

from qfuse.ir.ops.activation import Activation
from qfuse.ir.ops.convolution import FusedConvolution
from qfuse.ir.ops.linear import FusedLinear
from qfuse.ir.ops.matmul import FusedMatmul
from qfuse.ir.ops.norms import LayerNorm, RmsNorm

Span = tuple[type[Any], ...]
"""The ops that one kernel call fuses, as view types, from the first to the last."""

LINEAR: Span = (FusedLinear,)
CONVOLUTION: Span = (FusedConvolution,)
MATMUL: Span = (FusedMatmul,)
RMS_NORM: Span = (RmsNorm,)
LAYER_NORM: Span = (LayerNorm,)
ACTIVATION: Span = (Activation,)
LINEAR_ROWWISE: Span = (FusedLinear, Activation)
"""A linear and the rowwise op that uses it: a producer-consumer fusion."""
