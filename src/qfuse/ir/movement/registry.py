"""Maps nodes to movements."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload
from torch.fx import Node

from qfuse.ir.aten import aten
from qfuse.ir.graph.schema import arguments, is_call
from qfuse.ir.movement.base import Movement
from qfuse.ir.movement.collective import WAITS, collective_of
from qfuse.ir.movement.gather import Gather, Index
from qfuse.ir.movement.reshape import Copy, Expand, Permute, Squeeze, Unsqueeze, View
from qfuse.ir.movement.slice import Flip, Repeat, Roll, Select, Slice
from qfuse.ir.movement.window import Diagonal, EdgePad, RepeatInterleave, Unfold
from qfuse.ir.ops.view_ops import SIZED_VIEWS, SQUEEZES, TURNS
from qfuse.ir.ops.views import dtype_of, node_of, shape_of
from qfuse.ir.sizes import Size, same_size

SPLITS: tuple[OpOverload, ...] = (
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.unbind.int,
)
"""Ops with several results, each of which is a slice or a select."""

EDGE_PADS: tuple[OpOverload, ...] = (
    aten.pad.default,
    aten.reflection_pad1d.default,
    aten.reflection_pad2d.default,
    aten.reflection_pad3d.default,
    aten.replication_pad1d.default,
    aten.replication_pad2d.default,
    aten.replication_pad3d.default,
)
"""Paddings with copies of elements; constant padding is a different op after normalizing."""


def movement_of(node: object) -> Movement | None:
    """Return the movement of ``node``; ``None`` if it is not a supported movement."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    if node.target is operator.getitem:
        return _part(node)
    make = _BY_OP.get(node.target)
    if make is None:
        return None
    # All ops of the table take the moved tensor first, under several names.
    moved = next(iter(_args(node).values()))
    return make(node, node_of(moved))


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
    # A size that torch took for 1, but that is not known to be 1, is missing here; then the ranks
    # differ and the op is not supported.
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
    elif is_call(node, aten.t.default):
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
    # So that the index finds its block.
    if _is_int(index) and index < 0 and isinstance(size, int):
        index += size
    return Select(node, source, axis % len(shape_of(source)), index)


def _index_select_of(node: Node, source: Node) -> Movement | None:
    a = _args(node)
    if not shape_of(source) or not _is_int(a["dim"]):
        return None
    return Index(node, source, a["dim"] % len(shape_of(source)), node_of(a["index"]))


def _index_of(node: Node, source: Node) -> Movement | None:
    """Return an index by one integer tensor; masks and several tensors are not supported."""
    indices = _args(node)["indices"]
    named = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    # A mask of bools selects as many elements as are true, a number that depends on values.
    if len(named) != 1 or dtype_of(named[0][1]) not in {torch.int32, torch.int64}:
        return None
    return Index(node, source, *named[0])


def _embedding_of(node: Node, source: Node) -> Movement:
    return Index(node, source, 0, node_of(_args(node)["indices"]))


def _gather_of(node: Node, source: Node) -> Movement | None:
    a = _args(node)
    rank = len(shape_of(source))
    index = node_of(a["index"])
    if not rank or len(shape_of(index)) != rank or not _is_int(a["dim"]):
        return None
    return Gather(node, source, a["dim"] % rank, index)


def _unfold_of(node: Node, source: Node) -> Movement | None:
    a = _args(node)
    axis, size, step = a["dimension"], a["size"], a["step"]
    rank = len(shape_of(source))
    if not rank or not all(map(_is_int, (axis, size, step))) or size < 1:
        return None
    return Unfold(node, source, axis % rank, size, step)


def _diagonal_of(node: Node, source: Node) -> Movement | None:
    a = _args(node)
    rank = len(shape_of(source))
    return Diagonal(node, source, a["offset"], a["dim1"] % rank, a["dim2"] % rank)


def _repeat_interleave_of(node: Node, source: Node) -> Movement | None:
    a = _args(node)
    count, axis = a["repeats"], a["dim"]
    rank = len(shape_of(source))
    if not rank or not _is_int(count) or count < 1 or not _is_int(axis):
        return None
    return RepeatInterleave(node, source, axis % rank, count)


def _awaited(node: Node, source: Node) -> Movement | None:
    """Return the awaited collective; its source is the tensor that the collective sends."""
    return collective_of(node, source)


def _edge_pad_of(node: Node, source: Node) -> Movement | None:
    a = _args(node)
    if a.get("mode") == "constant":
        return None
    pads = a["pad"] if "pad" in a else a["padding"]
    last = len(shape_of(source)) - 1
    # Paddings are listed from the last axis backward, two numbers for each.
    axes = sorted({last - i // 2 for i, count in enumerate(pads) if count != 0})
    return EdgePad(node, source, tuple(axes))


def _flip_of(node: Node, source: Node) -> Movement:
    rank = len(shape_of(source))
    return Flip(node, source, tuple(d % rank for d in _args(node)["dims"]) if rank else ())


def _roll_of(node: Node, source: Node) -> Movement | None:
    rank = len(shape_of(source))
    a = _args(node)
    axes, shifts = a["dims"], a["shifts"]
    # Without axes, `roll` flattens the tensor and rolls that.
    if not axes or not rank or not all(map(_is_int, shifts)):
        return None
    wrapped = tuple(d % rank for d in axes)
    # Shifts along an axis that is named twice would have to be added.
    return Roll(node, source, tuple(shifts), wrapped) if len(set(wrapped)) == len(axes) else None


def _repeat_of(node: Node, source: Node) -> Movement | None:
    counts = _args(node)["repeats"]
    return Repeat(node, source, tuple(counts)) if all(map(_is_int, counts)) else None


def _part(node: Node) -> Movement | None:
    """Return the movement of one result of a split."""
    split, index = node.args[0], int(str(node.args[1]))
    if not is_call(split, *SPLITS):
        return None
    assert isinstance(split, Node), "a call is a node"
    a = _args(split)
    source, axis = node_of(a["self"]), a["dim"]
    parts = split.meta["val"]
    if is_call(split, aten.unbind.int):
        return Select(node, source, axis % len(shape_of(source)), index)
    sizes = [part.shape[axis] for part in parts]
    if not all(map(_is_int, sizes)):
        return None
    axis %= len(shape_of(source))
    start = sum(sizes[:index])
    end = start + sizes[index]
    return Slice(node, source, axis, start, end, 1, (start, end))


def _args(node: Node) -> dict[str, Any]:
    """Return the arguments of an ATen op; its schema determines their types."""
    return dict(arguments(node))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_Maker: TypeAlias = Callable[[Node, Node], Movement | None]

_MAKERS: tuple[tuple[tuple[Any, ...], _Maker], ...] = (
    (SIZED_VIEWS, _view),
    (TURNS, _permute_of),
    ((aten.unsqueeze.default,), _unsqueeze_of),
    (SQUEEZES, _squeeze_of),
    ((aten.expand.default,), _expand),
    ((aten.slice.Tensor,), _slice_of),
    ((aten.select.int,), _select_of),
    ((aten.index_select.default,), _index_select_of),
    ((aten.clone.default, aten.alias.default), _copy),
    ((aten.flip.default,), _flip_of),
    ((aten.roll.default,), _roll_of),
    ((aten.repeat.default,), _repeat_of),
    ((aten.index.Tensor,), _index_of),
    ((aten.embedding.default,), _embedding_of),
    ((aten.gather.default,), _gather_of),
    ((aten.unfold.default,), _unfold_of),
    ((aten.diagonal.default,), _diagonal_of),
    ((aten.repeat_interleave.self_int,), _repeat_interleave_of),
    (EDGE_PADS, _edge_pad_of),
    (WAITS, _awaited),
)

_BY_OP: dict[object, _Maker] = {op: make for ops, make in _MAKERS for op in ops}

MOVEMENT_OPS: tuple[OpOverload, ...] = tuple(op for ops, _ in _MAKERS for op in ops)
"""The single-result ops that :func:`movement_of` may support."""
