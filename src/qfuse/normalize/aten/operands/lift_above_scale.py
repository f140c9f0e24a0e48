"""Ops between the scale of an activation and its product, on the quantized values instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx.node import Argument

from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.constants import constant_value, number_of
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.views import dtype_of, node_of, shape_of
from qfuse.ir.quant.spec import dtype_name, dtype_range
from qfuse.ir.sizes import Size, is_one, same_shape, same_size
from qfuse.normalize.aten.operands.factors import ScaledValues, scaled_values
from qfuse.normalize.aten.operands.narrow_activation import is_multiplied
from qfuse.normalize.match.broadcast import padded
from qfuse.normalize.match.signs import is_not_negative
from qfuse.rewrite.pattern.base import is_tensor
from qfuse.rewrite.prelude import (
    Exactness,
    Miss,
    MissCode,
    Node,
    OpOverload,
    Rewriter,
    Rule,
    arguments,
    aten,
)

_RELUS = (aten.relu.default, aten.clamp.default, aten.clamp_min.default)
_FILLS = (aten.masked_fill.Scalar, aten.masked_fill.Tensor)
_WHERE = (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf)
_SCALES = (aten.mul.Tensor, aten.div.Tensor)


@dataclass(frozen=True, slots=True)
class LiftedOp:
    """An op on scaled values.

    Attributes:
        node: The op.
        parts: The values that it reads: several for a concatenation.
        zero: The quantized value of zero.
        factors: The factors of the result, in the order of the path of the first part.
    """

    node: Node
    parts: tuple[ScaledValues, ...]
    zero: int
    factors: tuple[Argument | tuple[Argument, ...], ...]


class LiftAboveScale(Rule[LiftedOp]):
    """``relu(cast(q) * s)`` becomes ``cast(relu(q)) * s``.

    Before::

        q int8 -> cast -> mul(s) -> relu -> linear

    After::

        q int8 -> relu -> cast -> mul(s) -> linear

    So do a clamp at zero, ``masked_fill``, ``where`` and padding with zero, and a concatenation of
    values with equal scales, or with scales that are concatenated along the same axis. A zero point
    of one known integer stands for zero. The other rules then read an activation that is scaled at
    run time. Applied where a product reads the values.

    Rounding: the same values are multiplied in the same order, and a ReLU commutes with factors
    that are not negative, but a zero gets the sign of its scale. With a scale that is infinite or
    NaN it is NaN.

    Refuses: a ReLU of values whose scale may be negative; another zero point; parts with other
    scales along their last axis; other numbers than zero; activations with constant scales, which
    other rules read.
    """

    name = "lift-above-scale"
    anchors: ClassVar[tuple[OpOverload, ...]] = (
        *_RELUS,
        *_FILLS,
        *_WHERE,
        aten.cat.default,
        aten.constant_pad_nd.default,
    )
    exactness = Exactness.ROUNDING

    def match(self, node: Node) -> LiftedOp | Miss:
        """Match an op on quantized values that are scaled, on their way to a product."""
        found = [scaled_values(operand) for operand in _operands(node)]
        parts = [part for part in found if part is not None]
        if not parts or len(parts) < len(found) or not _is_read(node, parts):
            text = "it does not compute on values that are scaled at run time"
            return Miss(MissCode.PATTERN, node, text, progress=0)
        site = _site(node, parts)
        if isinstance(site, Miss) and any(part.is_dequantized for part in parts):
            # A dequantize may sink below the op later.
            site.progress = 0
        return site

    def rewrite(self, site: LiftedOp, rw: Rewriter) -> None:
        """Apply the op to the quantized values, and scale the result as before."""
        first = _template(site.parts)
        q = _applied(rw, site)
        value, base = _value(rw, first, q, site.zero), list(site.factors)
        if first.is_dequantized:
            base = base[1:]
        for step in first.path:
            if is_call(step, *_SCALES):
                factor = base.pop(0)
                if isinstance(factor, tuple):
                    factor = _cat_factors(rw, site, factor)
                op = overload_of(step)
                assert op is not None, "a product is a call"
                value = rw.call(op, value, factor)
            else:
                value = rw.call(aten._to_copy.default, value, dtype=dtype_of(step))
        rw.replace(site.node, value)


def _site(node: Node, parts: Sequence[ScaledValues]) -> LiftedOp | Miss:
    first = _template(parts)
    scaled = dtype_of(first.path[-1] if first.path else first.value)
    if dtype_of(node) != scaled:
        text = "its result is {} and the scaled values are {}"
        names = dtype_name(dtype_of(node)), dtype_name(scaled)
        return Miss(MissCode.DTYPE, node, text, *names, progress=2)
    zeros = {_zero_of(part) for part in parts}
    zero = next(iter(zeros))
    if len(zeros) > 1 or zero is None:
        text = "zero is not one known quantized value of them: the zero point is not one constant"
        return Miss(MissCode.ZERO_POINT, node, text, progress=2)
    factors: tuple[Argument | tuple[Argument, ...], ...] | Miss = _own_factors(parts[0])
    if is_call(node, aten.cat.default):
        factors = _joined(node, parts)
    elif is_call(node, *_RELUS) and not all(map(is_not_negative, _own_factors(parts[0]))):
        text = "the sign of the scale is not known, so the ReLU stays after it"
        return Miss(MissCode.RANGE, node, text, progress=2)
    return factors if isinstance(factors, Miss) else LiftedOp(node, tuple(parts), zero, factors)


def _template(parts: Sequence[ScaledValues]) -> ScaledValues:
    """Return the part whose ops scale the result: one that is multiplied, if there is one."""
    return next((part for part in parts if not part.is_dequantized), parts[0])


def _operands(node: Node) -> list[Node]:
    """Return what ``node`` applies a ReLU to, fills with zeros, or concatenates."""
    a = arguments(node)
    if is_call(node, aten.cat.default):
        tensors = a["tensors"]
        assert isinstance(tensors, (list, tuple)), "operands are a list"
        return [part for part in tensors if isinstance(part, Node)]
    if is_call(node, *_RELUS):
        zero = is_call(node, aten.relu.default) or number_of(a["min"]) == 0
        return [node_of(a["self"])] if zero and a.get("max") is None else []
    if is_call(node, *_FILLS, aten.constant_pad_nd.default):
        return [node_of(a["self"])] if _is_zero(a["value"]) else []
    for one, other in ((a["self"], a["other"]), (a["other"], a["self"])):
        if _is_zero(other) and is_tensor(one):
            return [one]
    return []


def _is_zero(value: object) -> bool:
    known = constant_value(value)
    return number_of(value) == 0 if known is None else not bool(known.any())


def _is_read(node: Node, parts: Sequence[ScaledValues]) -> bool:
    """Whether a product reads ``node``, and other rules do not read it as it is."""
    shapes = all(same_shape(shape_of(part.value), _top_shape(part)) for part in parts)
    moved = any(part.stored.views for part in parts)
    kinds = {dtype_of(part.stored.q) for part in parts}
    scaled = any(map(_scales_at_run_time, parts)) or any(is_call(u, *_SCALES) for u in node.users)
    is_cat = is_call(node, aten.cat.default)
    if is_call(node, aten.constant_pad_nd.default):
        kept = _pads_beside_scales(node, parts[0])
    else:
        kept = is_cat or same_shape(shape_of(node), _top_shape(parts[0]))
    return shapes and kept and not moved and len(kinds) == 1 and scaled and is_multiplied(node)


def _pads_beside_scales(node: Node, part: ScaledValues) -> bool:
    """Whether each factor is one number along the axes that are padded."""
    pads, rank = arguments(node)["pad"], len(shape_of(node))
    assert isinstance(pads, (list, tuple)), "paddings are a list"
    axes = {rank - 1 - index // 2 for index, pad in enumerate(pads) if pad != 0}
    for _, factor, _ in part.factors:
        grid = padded(shape_of(factor), rank) if isinstance(factor, Node) else (1,) * rank
        if not all(is_one(grid[axis]) for axis in axes):
            return False
    return True


def _top_shape(part: ScaledValues) -> Sequence[Size]:
    return shape_of(part.path[-1] if part.path else part.value)


def _scales_at_run_time(part: ScaledValues) -> bool:
    return any(
        isinstance(factor, Node) and constant_value(factor) is None for _, factor, _ in part.factors
    )


def _zero_of(part: ScaledValues) -> int | None:
    """Return the quantized value of zero; ``None`` if it is not one known number of the dtype."""
    zero = part.stored.zero
    if zero is None:
        return 0
    known, number = constant_value(zero), number_of(zero)
    if known is not None and known.numel() and bool((known == known.flatten()[0]).all()):
        number = known.flatten()[0].item()
    low, high = dtype_range(dtype_of(part.stored.q))
    if number is None or number != int(number) or not low <= number <= high:
        return None
    return int(number)


def _own_factors(part: ScaledValues) -> tuple[Argument, ...]:
    return tuple(factor for _, factor, _ in part.factors)


def _joined(
    node: Node, parts: Sequence[ScaledValues]
) -> tuple[Argument | tuple[Argument, ...], ...] | Miss:
    """Return the factors of a concatenation: one for all parts, or those to concatenate."""
    rank, dim = len(shape_of(node)), arguments(node)["dim"]
    assert isinstance(dim, int), "an axis is a number"
    axis = dim % rank
    steps = [_steps(part) for part in parts]
    counts = {len(part.factors) for part in parts}
    alike = all(each == steps[0] for each in steps) and len(counts) == 1
    # A dequantize of all parts needs one set of parameters.
    if not alike or (_template(parts).is_dequantized and not _same_parameters(parts)):
        return _other_scales(node)
    joined: list[Argument | tuple[Argument, ...]] = []
    for level in zip(*(_own_factors(part) for part in parts), strict=True):
        if all(factor is level[0] or _same_number(factor, level[0]) for factor in level):
            shape = padded(shape_of(level[0]), rank) if isinstance(level[0], Node) else ()
            if not shape or is_one(shape[axis]):
                joined.append(level[0])
                continue
        if axis == rank - 1 or not _are_per_index(level, parts, axis):
            return _other_scales(node)
        joined.append(tuple(level))
    if _template(parts).is_dequantized and isinstance(joined[0], tuple):
        return _other_scales(node)
    return tuple(joined)


def _other_scales(node: Node) -> Miss:
    return Miss(MissCode.GRANULARITY, node, "the parts have different scales", progress=2)


def _steps(part: ScaledValues) -> list[tuple[object, torch.dtype]]:
    """Return the ops of a path and their dtypes; a dequantize without a zero point multiplies."""
    steps: list[tuple[object, torch.dtype]] = [
        (step.target if is_call(step, *_SCALES) else cast_source, dtype_of(step))
        for step in part.path
    ]
    return [(aten.mul.Tensor, dtype_of(part.value)), *steps] if part.is_dequantized else steps


def _same_number(one: Argument, other: Argument) -> bool:
    return number_of(one) is not None and number_of(one) == number_of(other)


def _same_parameters(parts: Sequence[ScaledValues]) -> bool:
    made = [as_dequantize(part.value) for part in parts]
    return all(each is not None and each.params == made[0].params for each in made if made[0])


def _are_per_index(level: Sequence[Argument], parts: Sequence[ScaledValues], axis: int) -> bool:
    """Whether all factors are tensors with one entry, or one per index, of the joined axis."""
    if not all(isinstance(factor, Node) for factor in level):
        return False
    rank = len(shape_of(parts[0].value))
    grids = [padded(shape_of(node_of(factor)), rank) for factor in level]
    if len({dtype_of(node_of(factor)) for factor in level}) > 1:
        return False
    for grid, part in zip(grids, parts, strict=True):
        rest = [size for other, size in enumerate(grid) if other != axis]
        first = [size for other, size in enumerate(grids[0]) if other != axis]
        fits = is_one(grid[axis]) or same_size(grid[axis], shape_of(part.value)[axis])
        if not fits or not same_shape(rest, first):
            return False
    return True


def _applied(rw: Rewriter, site: LiftedOp) -> Node:
    """Apply the op to quantized values."""
    node, q, zero = site.node, site.parts[0].stored.q, site.zero
    if is_call(node, aten.cat.default):
        every = [part.stored.q for part in site.parts]
        return rw.call(aten.cat.default, every, arguments(node)["dim"])
    if is_call(node, *_RELUS):
        return rw.call(aten.clamp.default, q, min=zero)
    a = arguments(node)
    if is_call(node, aten.constant_pad_nd.default):
        return rw.call(aten.constant_pad_nd.default, q, a["pad"], zero)
    if is_call(node, *_FILLS):
        return rw.call(aten.masked_fill.Scalar, q, a["mask"], zero)
    if _is_zero(a["other"]):
        return rw.call(aten.where.ScalarOther, a["condition"], q, zero)
    return rw.call(aten.where.ScalarSelf, a["condition"], zero, q)


def _value(rw: Rewriter, part: ScaledValues, q: Node, zero: int) -> Node:
    """Cast and shift quantized values, or dequantize them, as those of a part."""
    known = as_dequantize(part.value)
    if known is not None:
        return rw.call(ops.dequantize, *known.params.call_args(q))
    dtype = dtype_of(part.value)
    value = q if dtype_of(q) == dtype else rw.call(aten._to_copy.default, q, dtype=dtype)
    # A number, since a tensor may have an entry for each row of the part.
    return value if part.stored.zero is None else rw.call(aten.sub.Tensor, value, zero)


def _cat_factors(rw: Rewriter, site: LiftedOp, level: Sequence[Argument]) -> Node:
    """Concatenate factors along the axis of the parts."""
    rank, dim = len(shape_of(site.node)), arguments(site.node)["dim"]
    assert isinstance(dim, int), "an axis is a number"
    axis, made = dim % rank, []
    for factor, part in zip(level, site.parts, strict=True):
        node = node_of(factor)
        while len(shape_of(node)) < rank:
            node = rw.call(aten.unsqueeze.default, node, 0)
        if not same_size(shape_of(node)[axis], shape_of(part.value)[axis]):
            sizes: list[Argument] = [-1] * rank
            sizes[axis] = rw.sizes(part.value, axis + 1)[axis]
            node = rw.call(aten.expand.default, node, sizes)
        made.append(node)
    return rw.call(aten.cat.default, made, axis)
