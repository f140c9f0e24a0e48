"""Operands of products of two quantized activations, below movements and factors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx.node import Argument

from qfuse.ir.dtypes import BYTES
from qfuse.ir.graph.schema import is_call
from qfuse.ir.movement.base import Movement
from qfuse.ir.movement.registry import movement_of
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.constants import constant_value, is_constant_expression
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.views import dtype_of
from qfuse.rewrite.node_mover import NodeMover
from qfuse.rewrite.prelude import Node, Rewriter, arguments, aten

_FACTORS = (aten.mul.Tensor, aten.div.Tensor)
# Bounds the search above an operand.
_STEPS = 16


def moved_operand(operand: Node) -> tuple[tuple[Movement, ...], Node]:
    """Return the movements above an operand, from the last to the first, and what they move."""
    movements: list[Movement] = []
    while len(movements) < _STEPS and (movement := movement_of(operand)) is not None:
        movements.append(movement)
        operand = movement.source
    return tuple(movements), operand


def reapply_movements(rw: Rewriter, movements: Sequence[Movement], value: Node) -> Node:
    """Apply what :func:`moved_operand` found to another value of the same shape."""
    mover = NodeMover(rw)
    for movement in reversed(movements):
        value = movement.apply(mover, value)
    return value


def scaled_by_constant(node: Node) -> tuple[Node, Argument, torch.Tensor] | None:
    """Return the value that ``node`` multiplies or divides by a constant, the constant, its value.

    The constant is a number or a node.
    """
    if not is_call(node, *_FACTORS):
        return None
    a = arguments(node)
    sides = [(a["self"], a["other"])]
    # `c / x` is not linear in x.
    if not is_call(node, aten.div.Tensor):
        sides.append((a["other"], a["self"]))
    for source, factor in sides:
        value = _value(factor)
        if isinstance(source, Node) and value is not None and constant_value(source) is None:
            return source, factor, value
    return None


def _value(factor: object) -> torch.Tensor | None:
    if isinstance(factor, bool):
        return None
    if isinstance(factor, (int, float)):
        return torch.tensor(float(factor), dtype=torch.float64)
    return constant_value(factor)


def scaled_at_run_time(node: Node) -> tuple[Node, Node] | None:
    """Return the 8-bit values that ``node`` casts and multiplies by a tensor, and that tensor.

    Both are computed at run time.
    """
    if not is_call(node, aten.mul.Tensor):
        return None
    a = arguments(node)
    for value, by in ((a["self"], a["other"]), (a["other"], a["self"])):
        q = cast_source(value)
        if q is None or dtype_of(q) not in BYTES or is_constant_expression(q):
            continue
        if isinstance(by, Node) and constant_value(by) is None:
            return q, by
    return None


def is_quantized_activation(operand: Node, *, factors: bool = True) -> bool:
    """Whether an operand is a dequantize of values computed at run time, below movements.

    Args:
        operand: An operand of a product.
        factors: Look through constant factors too, which can scale the product instead.
    """
    node = _unscaled(operand) if factors else moved_operand(operand)[1]
    return _is_dequantized_activation(node)


def is_scaled_activation(operand: Node) -> bool:
    """Whether an operand is a quantized activation, or one that is scaled at run time."""
    node = _unscaled(operand)
    return scaled_at_run_time(node) is not None or _is_dequantized_activation(node)


def _unscaled(operand: Node) -> Node:
    """Return what movements and constant factors are applied to."""
    for _ in range(_STEPS):
        _, operand = moved_operand(operand)
        scaled = scaled_by_constant(operand)
        if scaled is None:
            break
        operand = scaled[0]
    return operand


def _is_dequantized_activation(node: Node) -> bool:
    found = as_dequantize(node)
    return found is not None and not is_constant_expression(found.q)
