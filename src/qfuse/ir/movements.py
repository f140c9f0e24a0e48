"""Which movement a node of a graph is."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.fx import Node

from qfuse.ir.movement import Movement
from qfuse.ir.picking import Flip, IndexSelect, Repeat, Roll, Select, Slice
from qfuse.ir.reshaping import Copy, Expand, Permute, Squeeze, Unsqueeze, View
from qfuse.ir.schema import arguments, is_call
from qfuse.ir.sizes import Size, same_size
from qfuse.ir.views import node_of, shape_of

if TYPE_CHECKING:
    from torch._ops import OpOverload

__all__ = ["MOVEMENT_OPS", "SPLITS", "movement_of"]

_aten = torch.ops.aten

SPLITS: tuple[OpOverload, ...] = (_aten.split.Tensor, _aten.split_with_sizes.default)
"""Ops of several results, each of which is a slice."""


def movement_of(node: object) -> Movement | None:
    """Return the movement that ``node`` is; ``None`` if it is none, or one that is not covered."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    if node.target is operator.getitem:
        return _part(node)
    for ops, make in _MAKERS:
        if is_call(node, *ops):
            return make(node, node_of(_args(node)["self"]))
    return None


def _copy(node: Node, source: Node) -> Movement:
    return Copy(node, source)


def _view(node: Node, source: Node) -> Movement:
    return View(node, source)


def _expand(node: Node, source: Node) -> Movement:
    return Expand(node, source)


def _unsqueeze_of(node: Node, source: Node) -> Movement | None:
    axis = _args(node)["dim"]
    return Unsqueeze(node, source, (axis % len(shape_of(node)),)) if _is_int(axis) else None


def _squeeze_of(node: Node, source: Node) -> Movement | None:
    before = shape_of(source)
    a = _args(node)
    dims = a.get("dim", list(range(len(before))))
    named = [d % max(len(before), 1) for d in (dims if isinstance(dims, (list, tuple)) else [dims])]
    axes = tuple(sorted({axis for axis in named if before and same_size(before[axis], 1)}))
    return Squeeze(node, source, axes) if len(before) - len(axes) == len(shape_of(node)) else None


def _permute_of(node: Node, source: Node) -> Movement:
    rank = len(shape_of(source))
    a = _args(node)
    dims = list(range(rank))
    if "dims" in a:
        dims = [d % rank for d in a["dims"]] if rank else []
    elif "dim0" in a and rank:
        first, second = a["dim0"] % rank, a["dim1"] % rank
        dims[first], dims[second] = second, first
    elif is_call(node, _aten.t.default):
        dims.reverse()
    return Permute(node, source, tuple(dims))


def _slice_of(node: Node, source: Node) -> Movement | None:
    a = _args(node)
    axis, step = a["dim"], a["step"]
    if not _is_int(axis) or not _is_int(step):
        return None
    size = shape_of(source)[axis]
    start, end = a["start"], a["end"]
    bounds = (start, end)
    return Slice(
        node,
        source,
        axis % len(shape_of(source)),
        _clamp(0 if start is None else start, size),
        _clamp(size if end is None else end, size),
        step,
        bounds,
    )


def _clamp(index: Any, size: Size) -> int | None:
    if not _is_int(index) or not isinstance(size, int):
        return None
    clamped: int = min(max(index + size if index < 0 else index, 0), size)
    return clamped


def _select_of(node: Node, source: Node) -> Movement | None:
    a = _args(node)
    axis, index = a["dim"], a["index"]
    if not _is_int(axis):
        return None
    size = shape_of(source)[axis]
    if _is_int(index) and index < 0 and isinstance(size, int):
        index += size
    return Select(node, source, axis % len(shape_of(source)), index)


def _index_select_of(node: Node, source: Node) -> Movement | None:
    a = _args(node)
    if not shape_of(source) or not _is_int(a["dim"]):
        return None
    return IndexSelect(node, source, a["dim"] % len(shape_of(source)), node_of(a["index"]))


def _flip_of(node: Node, source: Node) -> Movement:
    rank = len(shape_of(source))
    return Flip(node, source, tuple(d % rank for d in _args(node)["dims"]) if rank else ())


def _roll_of(node: Node, source: Node) -> Movement | None:
    rank = len(shape_of(source))
    a = _args(node)
    axes, shifts = a["dims"], a["shifts"]
    if not axes or not rank or not all(map(_is_int, shifts)):
        return None
    wrapped = tuple(d % rank for d in axes)
    return Roll(node, source, tuple(shifts), wrapped) if len(set(wrapped)) == len(axes) else None


def _repeat_of(node: Node, source: Node) -> Movement | None:
    counts = _args(node)["repeats"]
    return Repeat(node, source, tuple(counts)) if all(map(_is_int, counts)) else None


def _part(node: Node) -> Movement | None:
    """Return the slice that one result of a split is."""
    split, index = node.args[0], int(str(node.args[1]))
    if not is_call(split, *SPLITS):
        return None
    assert isinstance(split, Node), "a call is a node"
    a = _args(split)
    source, axis = node_of(a["self"]), a["dim"]
    parts = split.meta["val"]
    sizes = [part.shape[axis] for part in parts]
    if not all(map(_is_int, sizes)):
        return None
    axis %= len(shape_of(source))
    start = sum(sizes[:index])
    end = start + sizes[index]
    return Slice(node, source, axis, start, end, 1, (start, end))


def _args(node: Node) -> dict[str, Any]:
    """Return the arguments of an op of ATen, whose schema says what they are."""
    return dict(arguments(node))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_Maker: TypeAlias = Callable[[Node, Node], Movement | None]

_MAKERS: tuple[tuple[tuple[Any, ...], _Maker], ...] = (
    ((_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default), _view),
    ((_aten.permute.default, _aten.transpose.int, _aten.t.default), _permute_of),
    ((_aten.unsqueeze.default,), _unsqueeze_of),
    ((_aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims), _squeeze_of),
    ((_aten.expand.default,), _expand),
    ((_aten.slice.Tensor,), _slice_of),
    ((_aten.select.int,), _select_of),
    ((_aten.index_select.default,), _index_select_of),
    ((_aten.clone.default, _aten.alias.default), _copy),
    ((_aten.flip.default,), _flip_of),
    ((_aten.roll.default,), _roll_of),
    ((_aten.repeat.default,), _repeat_of),
)

MOVEMENT_OPS: tuple[OpOverload, ...] = tuple(op for ops, _ in _MAKERS for op in ops)
"""The ops of one result that :func:`movement_of` may know."""
