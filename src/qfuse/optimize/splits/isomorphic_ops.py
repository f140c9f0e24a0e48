"""Isomorphic ops on all parts of a tensor, and the op on the whole that replaces them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch.fx.node import map_arg

from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.movement.base import Movement
from qfuse.ir.movement.registry import movement_of
from qfuse.ir.movement.reshape import Copy, Expand, Permute, Squeeze, Unsqueeze, View
from qfuse.ir.movement.slice import Select, Slice
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import as_quantize
from qfuse.ir.ops.views import shape_of
from qfuse.ir.sizes import same_shape, same_size
from qfuse.optimize.commute.join import as_join
from qfuse.patterns.activations import ACTIVATION_OPS
from qfuse.patterns.casts import besides_dtype
from qfuse.rewrite.prelude import Node, OpOverload, arguments, aten

POINTWISE: frozenset[OpOverload] = frozenset(
    (
        *ACTIVATION_OPS,
        ops.quantize,
        aten._to_copy.default,
        *(aten.neg.default, aten.abs.default, aten.exp.default, aten.erf.default),
        *(aten.sqrt.default, aten.rsqrt.default, aten.reciprocal.default),
        *(aten.sin.default, aten.cos.default, aten.pow.Tensor_Scalar),
        *(aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar, aten.div.Scalar),
        *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
        *(aten.maximum.default, aten.minimum.default, aten.where.self),
    )
)
"""Elementwise ops: every result element depends only on the elements at its index."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call in terms of the nodes of the first part, which stand for those of the whole."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class IsomorphicOps:
    """Nodes, one per part, whose values are adjacent in one wide value.

    Attributes:
        nodes: One per part, in the order of the parts.
        axis: The axis along which the parts are adjacent.
        value: Fake tensor of the wide value.
        call: The call that computes the wide value; ``None`` for the tensor that is split.
        computes: Whether an op other than a view has run since the split, so that this is new
            memory.
    """

    nodes: tuple[Node, ...]
    axis: int
    value: torch.Tensor
    call: Call | None = None
    computes: bool = False

    @property
    def first(self) -> Node:
        """The node of the first part."""
        return self.nodes[0]

    @property
    def sizes(self) -> list[int]:
        """Sizes of the parts."""
        return _sizes(self.nodes, self.axis)

    def part(self, index: int) -> torch.Tensor:
        """Return a part of the wide value, as a fake tensor."""
        sizes = self.sizes
        return self.value.narrow(self.axis, sum(sizes[:index]), sizes[index])


def widen(nodes: Sequence[Node], of: Mapping[Node, IsomorphicOps]) -> IsomorphicOps | None:
    """Return the op on the whole for isomorphic calls on all parts.

    Args:
        nodes: The calls, one per part, in the order of the parts.
        of: The lanes of the operands that differ between parts.

    Returns:
        ``None`` where the parts of the whole would differ: an operand that varies along the parts,
        an axis that no longer exists, or an op without a known rule.
    """
    operands = list(dict.fromkeys(of[n] for n in nodes[0].all_input_nodes if n in of))
    found = _join(nodes, operands) or _pointwise(nodes, operands, of) or _moved(nodes, operands)
    if found is None:
        return None
    axis, call = found
    value = _fake(call, of)
    sizes = _sizes(nodes, axis)
    wide = list(shape_of(nodes[0]))
    wide[axis] = sum(sizes)
    # The rules below argue about the first part only; the shapes confirm it for all.
    alike = all(same_shape(_without(shape_of(n), axis), _without(wide, axis)) for n in nodes)
    if not alike or not same_shape(value.shape, wide):
        return None
    # A view costs nothing, on the parts or on the whole, so it is no result worth storing.
    copied = not isinstance(movement_of(nodes[0]), _VIEWS)
    return IsomorphicOps(
        tuple(nodes), axis, value, call, copied or any(o.computes for o in operands)
    )


_VIEWS = (View, Permute, Unsqueeze, Squeeze, Slice, Select, Expand)

_Found = tuple[int, Call]


def _as_is(node: Node) -> Call:
    op = overload_of(node)
    assert op is not None, f"not a call of an op: {node.format_node()}"
    return Call(op, node.args, dict(node.kwargs))


def _fake(call: Call, of: Mapping[Node, IsomorphicOps]) -> torch.Tensor:
    def value(node: Node) -> Any:
        return of[node].value if node in of else node.meta["val"]

    args, kwargs = map_arg((call.args, call.kwargs), value)
    with torch.no_grad():
        made: torch.Tensor = call.op(*args, **kwargs)
    return made


def _sizes(nodes: Sequence[Node], axis: int) -> list[int]:
    return [int(shape_of(node)[axis]) for node in nodes]


def _without(shape: Sequence[Any], axis: int) -> list[Any]:
    return [size for index, size in enumerate(shape) if index != axis]


def _join(nodes: Sequence[Node], operands: Sequence[IsomorphicOps]) -> _Found | None:
    """Join along another axis: every joined tensor is split in the same way."""
    join = as_join(nodes[0])
    # `stack` adds an axis, which would shift the axis of the parts.
    if join is None or join.is_stack or {o.axis for o in operands} != {operands[0].axis}:
        return None
    axis, known = operands[0].axis, {o.first for o in operands}
    same = all(o.sizes == operands[0].sizes for o in operands)
    if not same or join.axis == axis or not known.issuperset(join.parts):
        return None
    return axis, _as_is(nodes[0])


def _pointwise(
    nodes: Sequence[Node], operands: Sequence[IsomorphicOps], of: Mapping[Node, IsomorphicOps]
) -> _Found | None:
    """Compute elementwise: operands that are not split have size one along the parts."""
    node = nodes[0]
    if overload_of(node) not in POINTWISE:
        return None
    # Axes are aligned from the right.
    back = len(shape_of(operands[0].first)) - operands[0].axis
    for lanes in operands:
        if len(shape_of(lanes.first)) - lanes.axis != back or lanes.sizes != operands[0].sizes:
            return None
    for other in node.all_input_nodes:
        value = other.meta["val"]
        if other in of or not isinstance(value, torch.Tensor) or value.ndim < back:
            # Operands that broadcast along the axis of the parts are the same for all of them.
            continue
        if not same_size(value.shape[value.ndim - back], 1):
            return None
    axis = len(shape_of(node)) - back
    return (axis, _as_is(node)) if _is_plain(node, axis, of) else None


def _is_plain(node: Node, axis: int, of: Mapping[Node, IsomorphicOps]) -> bool:
    """Whether a cast changes only the dtype, and a quantize has one parameter along the parts.

    Blocks, of either level, and parameters per part are not supported: next to each other they
    would be one per part, and not one for the axis.
    """
    quantize = as_quantize(node)
    if quantize is not None:
        spec, own = quantize.params.spec, any(part in of for part in quantize.params.tensors)
        blocks = (spec.block, spec.outer or spec.block)
        return not own and all(block[axis] is None for block in blocks)
    return not is_call(node, aten._to_copy.default) or not besides_dtype(node)


def _moved(nodes: Sequence[Node], operands: Sequence[IsomorphicOps]) -> _Found | None:
    movement = movement_of(nodes[0])
    if movement is None or overload_of(nodes[0]) is None or len(operands) != 1:
        return None
    axis = operands[0].axis
    if isinstance(movement, View):
        return _viewed(nodes, movement, axis)
    if isinstance(movement, Expand):
        return _expanded(movement, axis)
    moved = _moved_axis(movement, axis)
    return None if moved is None else (moved, _as_is(nodes[0]))


def _moved_axis(movement: Movement, axis: int) -> int | None:
    """Return the position of an axis after a movement; ``None`` if it is cut, lost or unknown."""
    moved: int | None = None
    match movement:
        case Copy():
            moved = axis
        case Permute(dims=dims):
            moved = dims.index(axis)
        case Unsqueeze(axes=axes):
            moved = axis
            for new in axes:
                moved += new <= moved
        case Squeeze(axes=axes) if axis not in axes:
            moved = axis - sum(gone < axis for gone in axes)
        case Slice(axis=cut) if cut != axis:
            moved = axis
        case Select(axis=gone) if gone != axis:
            moved = axis - (gone < axis)
        case _:
            pass
    return moved


def _expanded(movement: Expand, axis: int) -> _Found | None:
    """Expand other axes; -1 keeps the size of an axis."""
    moved = axis + len(movement.after) - len(movement.before)
    if not same_size(movement.before[axis], movement.after[moved]):
        return None
    # The call has the size of the first part, not that of the whole.
    sizes = _given_sizes(movement.node)
    sizes[moved] = -1
    return moved, Call(aten.expand.default, (movement.source, sizes), {})


def _viewed(nodes: Sequence[Node], movement: View, axis: int) -> _Found | None:
    """View the whole so that the parts lie along an axis with as many rows in front of it.

    In row-major order, parts that are adjacent along an axis are also adjacent along such an axis.
    """
    rows = _product(movement.before[:axis])
    shapes = [shape_of(node) for node in nodes]
    if len({len(shape) for shape in shapes}) > 1:
        return None
    for moved, size in enumerate(movement.after):
        if not isinstance(size, int) or not same_size(_product(movement.after[:moved]), rows):
            continue
        rest = _without(movement.after, moved)
        if all(same_shape(_without(shape, moved), rest) for shape in shapes):
            return moved, _view_call(nodes, movement, moved)
    return None


def _view_call(nodes: Sequence[Node], movement: View, axis: int) -> Call:
    sizes = _given_sizes(movement.node)
    pairs = zip(movement.after, sizes, strict=True)
    # A -1 in the sizes was computed for the first part alone; known sizes replace it.
    known: list[Any] = [size if isinstance(size, int) else given for size, given in pairs]
    known[axis] = sum(_sizes(nodes, axis))
    # A reshape, since the wide value may have strides that do not allow a view.
    return Call(aten.reshape.default, (movement.source, known), {})


def _given_sizes(node: Node) -> list[Any]:
    a = arguments(node)
    sizes = a["shape"] if "shape" in a else a["size"]
    assert isinstance(sizes, (list, tuple)), f"not a list of sizes: {node.format_node()}"
    return list(sizes)


def _product(sizes: Sequence[Any]) -> Any:
    return reduce(operator.mul, sizes, 1)
