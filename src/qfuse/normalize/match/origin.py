"""Where a value comes from."""

from __future__ import annotations

import operator

import torch

from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.movement.registry import movement_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.convolution import as_convolution
from qfuse.ir.ops.linear import as_linear
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.rewrite.prelude import Node, aten

# The values that are looked at, and the steps between a dequantize and a product.
_MOST, _STEPS = 64, 8
_BETWEEN = (
    ops.quantize,
    ops.dequantize,
    aten.batch_norm.default,
    aten._native_batch_norm_legit_no_training.default,
)


def comes_from_quantized_product(x: Node) -> bool:
    """Whether ``x`` is computed from a linear or convolution with a dequantized operand.

    The search goes through elementwise ops, movements, batch norms and quantizations. It is
    bounded.
    """
    stack, seen = [x], {x}
    while stack and len(seen) <= _MOST:
        node = stack.pop()
        # A product ends the walk, whether it is quantized or not.
        product = as_linear(node) or as_convolution(node)
        if product is not None:
            if any(map(_is_dequantized, (product.x, product.weight))):
                return True
        elif _is_between(node):
            new = [source for source in node.all_input_nodes if source not in seen]
            seen.update(new)
            stack += new
    return False


def _is_between(node: Node) -> bool:
    op = overload_of(node)
    pointwise = op is not None and torch.Tag.pointwise in op.tags
    cast = cast_source(node) is not None
    return (
        pointwise
        or cast
        or is_call(node, *_BETWEEN)
        or node.target is operator.getitem
        or movement_of(node) is not None
    )


def _is_dequantized(operand: Node) -> bool:
    """Whether ``operand`` is a dequantize behind movements and casts."""
    for _ in range(_STEPS):
        if as_dequantize(operand) is not None:
            return True
        moves = movement_of(operand) is not None or cast_source(operand) is not None
        if not moves or not operand.all_input_nodes:
            return False
        operand = operand.all_input_nodes[0]
    return False
