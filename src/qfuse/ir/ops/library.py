"""The registry of qfuse's ops and their declarations.

All ops are functional. An op's reference defines its semantics: ops without a matching kernel are
expanded to it, and every kernel is tested against it. To add an op, declare it in its own file and
add it to one of the two tuples here.
"""

from __future__ import annotations

from torch._ops import OpOverload
from torch.fx import Node

from qfuse.ir.graph.schema import overload_of
from qfuse.ir.ops.activation import Activation
from qfuse.ir.ops.claimed.attention import Attention
from qfuse.ir.ops.claimed.average_pool import AveragePool
from qfuse.ir.ops.claimed.elementwise import Elementwise
from qfuse.ir.ops.convolution import FusedConvolution
from qfuse.ir.ops.declare import Op
from qfuse.ir.ops.linear import FusedLinear
from qfuse.ir.ops.matmul import FusedMatmul
from qfuse.ir.ops.norms import LayerNorm, RmsNorm
from qfuse.ir.ops.output import Output
from qfuse.ir.ops.qdq import Choose, Dequantize, Quantize, Requantize
from qfuse.ir.ops.softmax import Softmax
from qfuse.ir.ops.views import result_of
from qfuse.ir.quant.spec import QuantSpec

_CANONICAL: tuple[type[Op], ...] = (Quantize, Dequantize, Choose, Requantize)
_FUSED: tuple[type[Op], ...] = (
    FusedLinear,
    FusedConvolution,
    FusedMatmul,
    RmsNorm,
    LayerNorm,
    Activation,
    Softmax,
    Elementwise,
    AveragePool,
    Attention,
)
_DECLARATIONS: dict[OpOverload, type[Op]] = {d.overload: d for d in (*_CANONICAL, *_FUSED)}

CANONICAL: tuple[OpOverload, ...] = tuple(d.overload for d in _CANONICAL)
FUSED: tuple[OpOverload, ...] = tuple(d.overload for d in _FUSED)

quantize, dequantize, choose_qparams = Quantize.overload, Dequantize.overload, Choose.overload
requantize = Requantize.overload
linear, convolution = FusedLinear.overload, FusedConvolution.overload
matmul = FusedMatmul.overload
rms_norm, layer_norm, activation = RmsNorm.overload, LayerNorm.overload, Activation.overload
softmax = Softmax.overload
elementwise, average_pool = Elementwise.overload, AveragePool.overload
scaled_dot_product_attention = Attention.overload


def declaration_of(op: OpOverload | None) -> type[Op] | None:
    """Return the declaration of an op of qfuse; ``None`` for kernels and all other ops."""
    return None if op is None else _DECLARATIONS.get(op)


def as_op(value: object) -> Op | None:
    """View ``value`` as a call of an op of qfuse, or ``None``."""
    declared = declaration_of(overload_of(value)) if isinstance(value, Node) else None
    return None if declared is None else declared.of(value)


def output_of(node: Node) -> Output | None:
    """Return the output arguments of a fused op with several results, else ``None``."""
    return getattr(as_op(node), "output", None)


def stored_spec(node: Node) -> QuantSpec | None:
    """Return the spec with which its op quantized ``node``; ``None`` if it is not quantized."""
    source, index = result_of(node) or (node, 0)
    op = as_op(source)
    return None if op is None or index != 0 else op.result_spec
