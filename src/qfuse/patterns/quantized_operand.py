"""Operands of products of two quantized activations, below movements and factors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx.node import Argument

from qfuse.ir.dtypes import BYTES, FLOATS
from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.movement.base import Movement
from qfuse.ir.movement.registry import movement_of
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.constants import constant_value, is_constant_expression
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.sizes import Size, is_one, same_shape
from qfuse.rewrite.node_mover import NodeMover
from qfuse.rewrite.pattern.base import is_tensor
from qfuse.rewrite.prelude import Miss, MissCode, Node, Rewriter, arguments, aten

_FACTORS = (aten.mul.Tensor, aten.div.Tensor)
# Bound the search above an operand; each factor at run time may be one of two values.
_STEPS = 16
_FACTORS_ABOVE = 3


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


@dataclass(frozen=True, slots=True)
class Scaling:
    """A value that is multiplied or divided by a factor.

    Attributes:
        node: The product or quotient.
        source: The value.
        factor: The factor: a number or a node.
        value: Its value; ``None`` if it is computed at run time.
    """

    node: Node
    source: Node
    factor: Argument
    value: torch.Tensor | None

    @property
    def shape(self) -> tuple[Size, ...]:
        """The shape of the factor."""
        return tuple(shape_of(self.factor)) if isinstance(self.factor, Node) else ()

    @property
    def is_one_number(self) -> bool:
        """Whether all elements have one factor."""
        return all(map(is_one, self.shape))


@dataclass(frozen=True, slots=True)
class QuantizedOperand:
    """An operand of a product that is quantized below movements and factors.

    Attributes:
        steps: What is applied to it, from the last to the first.
        base: The dequantize, or quantized values that are cast, shifted and scaled at run time.
    """

    steps: tuple[Movement | Scaling, ...]
    base: Node

    def reapply(self, rw: Rewriter, value: Node) -> Node:
        """Apply the steps to another value of the same shape."""
        mover = NodeMover(rw)
        for step in reversed(self.steps):
            if isinstance(step, Scaling):
                op = overload_of(step.node)
                assert op is not None, "a product is a call"
                value = rw.call(op, value, step.factor)
            else:
                value = step.apply(mover, value)
        return value


def quantized_operand(operand: Node) -> QuantizedOperand | None:
    """View an operand as quantized values that are computed at run time."""
    return _below(operand, (), 0)


def _below(
    operand: Node, above: tuple[Movement | Scaling, ...], factors: int
) -> QuantizedOperand | None:
    movements, node = moved_operand(operand)
    steps = (*above, *movements)
    if _is_dequantized_activation(node, operand) or scaled_at_run_time(node) is not None:
        return QuantizedOperand(steps, node)
    if factors == _FACTORS_ABOVE:
        return None
    for scaling in scalings(node):
        found = _below(scaling.source, (*steps, scaling), factors + 1)
        if found is not None:
            return found
    return None


def scalings(node: Node) -> Iterator[Scaling]:
    """Yield the ways to view ``node`` as a value with a factor that has fewer elements."""
    known = scaled_by_constant(node)
    if known is not None:
        yield Scaling(node, *known)
        return
    if not is_call(node, *_FACTORS):
        return
    a = arguments(node)
    sides = [(a["self"], a["other"])]
    if not is_call(node, aten.div.Tensor):
        sides.append((a["other"], a["self"]))
    for source, factor in sides:
        if isinstance(source, Node) and isinstance(factor, Node) and _is_factor(source, factor):
            yield Scaling(node, source, factor, None)


def _is_factor(source: Node, factor: Node) -> bool:
    """Whether a value computed at run time is one factor for several elements."""
    if not is_tensor(source) or not is_tensor(factor):
        return False
    if dtype_of(factor) not in FLOATS or not dtype_of(source).is_floating_point:
        return False
    shape, fewer = shape_of(source), shape_of(factor)
    if len(fewer) > len(shape):
        return False
    sizes = [*(1,) * (len(shape) - len(fewer)), *fewer]
    one = [is_one(size) and not is_one(whole) for size, whole in zip(sizes, shape, strict=True)]
    kept = [whole if alone else size for size, whole, alone in zip(sizes, shape, one, strict=True)]
    return any(one) and same_shape(kept, shape)


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


def scaled_at_run_time(node: Node) -> tuple[Node, Argument] | None:
    """Return the 8-bit values that ``node`` casts, shifts and scales, and the scale.

    The values are computed at run time, and so is the scale, or else what is subtracted from them.
    """
    if not is_call(node, aten.mul.Tensor):
        return None
    a = arguments(node)
    for value, by in ((a["self"], a["other"]), (a["other"], a["self"])):
        # A number that is computed at run time, as by `item`, has no dtype.
        if not is_tensor(value) or (isinstance(by, Node) and not is_tensor(by)):
            continue
        q, zero = _unshifted(value)
        if q is None or dtype_of(q) not in BYTES or is_constant_expression(q):
            continue
        if any(isinstance(part, Node) and constant_value(part) is None for part in (by, zero)):
            return value, by
    return None


def _unshifted(value: Node) -> tuple[Node | None, Argument]:
    """Return what a value is cast from, and what is subtracted in between."""
    zero: Argument = None
    q, source = value, cast_source(value)
    while source is not None and dtype_of(q) not in BYTES:
        q, source = source, cast_source(source)
    if is_call(q, aten.sub.Tensor) and arguments(q)["alpha"] == 1:
        zero, shifted = arguments(q)["other"], arguments(q)["self"]
        if not isinstance(shifted, Node):
            return None, None
        q, source = shifted, cast_source(shifted)
        while source is not None and dtype_of(q) not in BYTES:
            q, source = source, cast_source(source)
    return (None if q is value else q), zero


def is_quantized_activation(operand: Node, *, factors: bool = True) -> bool:
    """Whether an operand is a dequantize of values computed at run time, below movements.

    Args:
        operand: An operand of a product.
        factors: Look through factors too, which can scale the product instead.
    """
    if not factors:
        return _is_dequantized_activation(moved_operand(operand)[1], operand)
    found = quantized_operand(operand)
    return found is not None and as_dequantize(found.base) is not None


def is_scaled_activation(operand: Node) -> bool:
    """Whether an operand is a quantized activation, or one that is scaled at run time."""
    return quantized_operand(operand) is not None


def refuse_float_operand(side: str, operand: Node) -> Miss:
    """Refuse a product whose ``side`` operand is float, while the other one is quantized."""
    text = "the {} operand is {}, the other one is quantized"
    return Miss(MissCode.NOT_QUANTIZED, operand, text, side, dtype_of(operand), progress=2)


def _is_dequantized_activation(node: Node, operand: Node) -> bool:
    """Whether ``node`` dequantizes, and ``operand``, into which it is moved, is not a weight.

    Rows of a weight that are looked up at run time count as an activation.
    """
    return as_dequantize(node) is not None and not is_constant_expression(operand)
