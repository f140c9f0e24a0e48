"""Match a weight times a scale that the graph repeats for every element of a group."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx.node import Argument

from qfuse.ir.dtypes import BYTES, COMPUTE_DTYPES
from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.constants import is_constant_expression
from qfuse.ir.ops.views import dtype_of, has_values, shape_of
from qfuse.ir.quant.spec import Arithmetic, Block, QuantSpec, dtype_range
from qfuse.ir.sizes import same_shape
from qfuse.normalize.match.constants import derived, evaluated
from qfuse.rewrite.pattern import Capture, Match, PatternRule, V, let, op
from qfuse.rewrite.pattern.base import is_tensor
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, Rewriter, arguments, aten

_MATRIX = 2
# Smaller groups would take more memory for their scales than they save.
_LEAST_GROUP = 8
# The elements of a line by which lines are sorted.
_KEYS = 256
Zero = Node | torch.Tensor | None
"""What is subtracted from integers: a node, or a number."""

_PRODUCTS = (aten.mm.default, aten.matmul.default, aten.linear.default, aten.addmm.default)
_TURNS = (aten.t.default, aten.transpose.int, aten.permute.default)


@dataclass(frozen=True, slots=True)
class ExpandedScale:
    """A weight, and its parameters with one entry per group.

    Attributes:
        node: The product.
        home: The integers, as they are computed.
        values: The quantized values, in the order of the groups.
        scale: One entry per block.
        zero: One zero point per block, of any dtype, or ``None``.
        block: The block of a group.
        order: For every index of the axis, where it is among the values; ``None`` if in order.
        axis: The axis whose order differs.
    """

    node: Node
    home: Node
    values: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    block: Block
    order: torch.Tensor | None = None
    axis: int = 0

    def in_order(self, values: Node, rw: Rewriter) -> Node:
        """Return the dequantized values in the order of the weight."""
        if self.order is None:
            return values
        order = derived(rw, self.home, self.order, "order")
        return rw.call(aten.index_select.default, values, self.axis, order)


def read_expanded(node: Node) -> ExpandedScale | Miss:
    """View a product of constants as quantized values in groups."""
    given = list(_parts(node))
    if not given:
        return Miss(
            MissCode.PATTERN, node, "it is not a product of integers with a scale", progress=0
        )
    integers, zero, scale = given[0]
    known = [evaluated(part) for part in (integers, scale)]
    shift = evaluated(zero) if isinstance(zero, Node) else zero
    if any(v is None or not has_values(v) for v in known) or (shift is None) != (zero is None):
        return Miss(MissCode.NO_VALUES, node, "its values are not known", progress=0)
    values, factor = (v for v in known if v is not None)
    shape = [int(s) for s in shape_of(node)]
    if not values.numel() or not bool((factor.isfinite() & (factor >= 0)).all()):
        return Miss(MissCode.RANGE, scale, "the factor is infinite, NaN or negative, so no scale")
    zeros = None if shift is None else shift.expand(shape)
    if zeros is not None and not bool(zeros.isfinite().all()):
        return Miss(MissCode.ZERO_POINT, integers, "a zero point is infinite or NaN")
    stored = _stored(values, zeros)
    if stored is None:
        return Miss(MissCode.RANGE, integers, "its integers do not fit in 8 bits")
    return _grouped(node, integers, stored, factor.expand(shape), zeros)


def _parts(node: Node) -> Iterator[tuple[Node, Zero, Node]]:
    """Yield integers, their zero point and the scale that ``node`` multiplies."""
    if not is_call(node, aten.mul.Tensor) or dtype_of(node) not in COMPUTE_DTYPES:
        return
    a = arguments(node)
    for one, scale in ((a["self"], a["other"]), (a["other"], a["self"])):
        if not is_tensor(one) or not is_tensor(scale) or not dtype_of(scale).is_floating_point:
            continue
        # One entry per element; other shapes are tiled by `dequantize-chain`.
        if len(shape_of(scale)) != _MATRIX or not same_shape(shape_of(scale), shape_of(node)):
            continue
        if not all(map(is_constant_expression, (one, scale))):
            continue
        found = _integers(one)
        if found is not None and same_shape(shape_of(one), shape_of(node)):
            yield (*found, scale)


def _integers(value: Node) -> tuple[Node, Zero] | None:
    """Return the integers behind casts, and what is subtracted from them."""
    node = _uncast(value)
    if is_call(node, aten.sub.Tensor, aten.add.Tensor):
        a = arguments(node)
        zero = _zero(node, a["other"])
        if not is_tensor(a["self"]) or zero is None or a["alpha"] != 1:
            return None
        one = _uncast(a["self"])
        # A difference in 8 bits wraps, and one of a broadcast value has another shape.
        wide = dtype_of(node) not in BYTES and same_shape(shape_of(one), shape_of(node))
        if wide and _is_integer(one):
            return one, zero
    return (node, None) if _is_integer(node) else None


def _zero(node: Node, other: Argument) -> Zero:
    """Return what a difference subtracts, or a sum adds, as a zero point."""
    adds = is_call(node, aten.add.Tensor)
    if isinstance(other, (int, float)) and not isinstance(other, bool):
        return torch.tensor(float(-other if adds else other))
    if adds or not is_tensor(other):
        return None
    zero = _uncast(other)
    # A cast to a narrower dtype rounds what is no integer.
    return zero if _is_integer(zero) else other


def _uncast(node: Node) -> Node:
    while (source := cast_source(node)) is not None and not _is_integer(node):
        node = source
    return node


def _is_integer(node: Node) -> bool:
    dtype = dtype_of(node)
    return not dtype.is_floating_point and not dtype.is_complex


def are_whole(zeros: torch.Tensor) -> bool:
    """Whether all zero points are integers, of any dtype."""
    return not zeros.is_floating_point() or bool((zeros == zeros.round()).all())


def _stored(values: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor | None:
    """Return integers in the 8-bit dtype that holds them and their zero points."""
    parts = [values] if zeros is None or not are_whole(zeros) else [values, zeros]
    low, high = min(int(p.min()) for p in parts), max(int(p.max()) for p in parts)
    for dtype in BYTES:
        least, most = dtype_range(dtype)
        if least <= low <= high <= most:
            return values.to(dtype)
    return None


def _grouped(
    node: Node,
    home: Node,
    values: torch.Tensor,
    scale: torch.Tensor,
    zeros: torch.Tensor | None,
) -> ExpandedScale | Miss:
    params = [scale] if zeros is None else [scale, zeros]
    steps = [_step(params, axis) for axis in range(_MATRIX)]
    if math.prod(steps) >= _LEAST_GROUP:
        return _with_steps(node, home, values, scale, zeros, steps)
    for axis in range(_MATRIX):
        if not _feeds_product(node):
            break
        order = _order(params, axis)
        moved = [p.index_select(axis, order) for p in params]
        steps = [_step(moved, each) for each in range(_MATRIX)]
        if math.prod(steps) < _LEAST_GROUP:
            continue
        shift = None if zeros is None else moved[1]
        turned = values.index_select(axis, order)
        found = _with_steps(node, home, turned, moved[0], shift, steps)
        inverse = torch.argsort(order)
        return ExpandedScale(
            node, home, found.values, found.scale, found.zero, found.block, inverse, axis
        )
    text = "a scale of shape {} has one entry per element, and no groups of equal ones"
    return Miss(MissCode.SHAPE, node, text, tuple(scale.shape))


def _step(params: list[torch.Tensor], axis: int) -> int:
    """Return the size of the largest equal groups of an axis in which nothing changes."""
    size = params[0].shape[axis]
    changes: set[int] = set()
    for param in params:
        after, before = param.narrow(axis, 1, size - 1), param.narrow(axis, 0, size - 1)
        differs = (after != before).any(1 - axis)
        changes.update((differs.nonzero().reshape(-1) + 1).tolist())
    return math.gcd(size, *changes)


def _with_steps(
    node: Node,
    home: Node,
    values: torch.Tensor,
    scale: torch.Tensor,
    zeros: torch.Tensor | None,
    steps: list[int],
) -> ExpandedScale:
    first = tuple(slice(None, None, step) for step in steps)
    block = tuple(
        None if step == size else step for step, size in zip(steps, scale.shape, strict=True)
    )
    zero = None if zeros is None else zeros[first].contiguous()
    # Without a zero point a spec equals one that never had any, and symmetric kernels take it.
    zero = zero if zero is not None and bool(zero.any()) else None
    return ExpandedScale(node, home, values.contiguous(), scale[first].contiguous(), zero, block)


def _order(params: list[torch.Tensor], axis: int) -> torch.Tensor:
    """Return the indices of an axis, sorted so that equal lines are likely to be neighbours."""
    # By a part of each line: the groups are found by comparing whole lines afterwards.
    parts = [p.movedim(axis, 0)[:, :: max(1, p.shape[1 - axis] // _KEYS)] for p in params]
    lines = torch.cat([part.double() for part in parts], 1)
    weights = torch.arange(1, lines.shape[1] + 1, dtype=torch.float64).sqrt()
    return torch.argsort((lines * weights).sum(1), stable=True)


def _feeds_product(node: Node) -> bool:
    """Whether all users are products with a matrix, which take the order of their input."""
    users = list(node.users)
    while users:
        user = users.pop()
        if is_call(user, *_TURNS):
            users += list(user.users)
        elif not is_call(user, *_PRODUCTS):
            return False
    return True


EXPANDED = Capture[ExpandedScale]("expanded")


def _read_whole(node: Node) -> ExpandedScale | Miss:
    found = read_expanded(node)
    if isinstance(found, ExpandedScale) and found.zero is not None and not are_whole(found.zero):
        return Miss(MissCode.ZERO_POINT, node, "its zero points are not integers", progress=0)
    return found


class ContractScale(PatternRule):
    """``(q - z) * s`` whose scale and zero point are repeated per element becomes ``dequantize``.

    Before::

        const q int8 [K, N] -> cast -> sub(index(z, groups)) -> mul(index(s, groups))

    After::

        const q int8 [K, N], s [K/g, N], z [K/g, N] -> qfuse.dequantize, blocks of g

    By ``repeat_interleave``, by views of an ``expand``, or by indices, as GPTQ stores the group of
    every input feature. A zero point may be a number, or hold integers as floats. If
    the groups are not in order (``act-order``), the values are sorted, and an ``index_select``
    restores their order; ``permute-features`` moves it to the activation.

    Exact: the same products of the same numbers.

    Refuses: scales that are computed at run time, negative or not finite; integers beyond 8 bits;
    groups of less than 8 elements; unsorted groups of a weight that is not a factor of a product.
    """

    name = "contract-scale"
    exactness = Exactness.EXACT
    pattern = op(aten.mul.Tensor, V("one"), V("other")).given(let(EXPANDED, _read_whole)).core()

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Add the constants, the dequantize, and the order."""
        found = site[EXPANDED]
        real = dtype_of(found.node)
        compute = torch.float64 if real is torch.float64 else torch.float32
        dtype = found.values.dtype
        spec = QuantSpec(dtype, *dtype_range(dtype), found.block, real, Arithmetic(compute))
        q = derived(rw, found.home, found.values, "stored")
        scale = derived(rw, found.home, found.scale, "scale")
        zero = None
        if found.zero is not None:
            zero = derived(rw, found.home, found.zero.to(torch.int32), "zero_point")
        y = rw.call(ops.dequantize, q, scale, zero, str(spec))
        rw.replace(found.node, found.in_order(y, rw))
