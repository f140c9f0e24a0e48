"""Weights of linears, and their transposes without a copy."""

from __future__ import annotations

import torch

from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.constants import is_constant_expression
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.views import QuantParams, dtype_of, shape_of, tensor_of
from qfuse.normalize.match.constants import derived
from qfuse.normalize.match.views import transpose_source
from qfuse.rewrite.prelude import Node, Rewriter, aten

_MATRIX = 2


def is_weight(value: Node) -> bool:
    """Whether ``value`` is a float matrix that depends only on constants."""
    return (
        isinstance(value.meta.get("val"), torch.Tensor)
        and dtype_of(value).is_floating_point
        and len(shape_of(value)) == _MATRIX
        and is_constant_expression(value)
    )


def call_linear(
    rw: Rewriter, x: Node, weight: Node, bias: Node | None = None, *, like: Node | None = None
) -> Node:
    """Add a linear; a bias of ``None`` is left out.

    Args:
        rw: The rewriter.
        x: Input.
        weight: Weight of shape ``[N, K]``.
        bias: Bias of shape ``[N]``.
        like: A linear whose result has the same type, so that it need not be inferred again.
    """
    operands = (x, weight) if bias is None else (x, weight, bias)
    if like is None:
        return rw.call(aten.linear.default, *operands)
    return rw.replay(aten.linear.default, operands, {}, tensor_of(like))


def transposed(rw: Rewriter, matrix: Node) -> Node:
    """Return the transpose of ``matrix``, a constant expression, without moving data.

    The search goes up through elementwise ops to a transpose, which cancels, or to a constant,
    whose transpose is another constant with the same memory.
    """
    source = transpose_source(matrix)
    if source is not None:
        return source
    value = constant_of(matrix)
    if value is not None:
        return derived(rw, matrix, value.t(), "t")
    # A cast and a dequantize work element by element, so the transpose may move above them.
    source = cast_source(matrix)
    if source is not None:
        return rw.call(aten._to_copy.default, transposed(rw, source), dtype=dtype_of(matrix))
    dequantize = as_dequantize(matrix)
    if dequantize is not None:
        params = dequantize.params
        outer = None if params.spec.outer is None else params.spec.outer[::-1]
        zero = None if params.zero_point is None else transposed(rw, params.zero_point)
        q, scale = transposed(rw, dequantize.q), transposed(rw, params.scale)
        second = None if params.outer_scale is None else transposed(rw, params.outer_scale)
        spec = params.spec.with_block(params.spec.block[::-1], outer)
        return rw.call(ops.dequantize, *QuantParams(spec, scale, zero, second).call_args(q))
    return rw.call(aten.t.default, matrix)
