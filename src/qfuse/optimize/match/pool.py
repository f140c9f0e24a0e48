"""Ops that give the greatest or the least element of windows, or of whole axes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.movement.base import Moved, Mover, keep, squeezed, with_axis
from qfuse.ir.ops.views import node_of, shape_of
from qfuse.ir.quant.spec import Block
from qfuse.ir.sizes import Size, is_positive
from qfuse.rewrite.prelude import Node, OpOverload, arguments, aten

# Per op: over how many axes it goes, what it is called without indices, whether it gives them.
_WINDOWS: dict[OpOverload, tuple[int, OpOverload, bool]] = {
    aten.max_pool1d.default: (1, aten.max_pool2d.default, False),
    aten.max_pool2d.default: (2, aten.max_pool2d.default, False),
    aten.max_pool3d.default: (3, aten.max_pool3d.default, False),
    aten.max_pool1d_with_indices.default: (1, aten.max_pool2d.default, True),
    aten.max_pool2d_with_indices.default: (2, aten.max_pool2d.default, True),
    aten.max_pool3d_with_indices.default: (3, aten.max_pool3d.default, True),
}
_WHOLE: tuple[OpOverload, ...] = (aten.amax.default, aten.amin.default)

POOLS: tuple[OpOverload, ...] = (*_WINDOWS, *_WHOLE)


@dataclass(frozen=True, slots=True)
class _Window:
    """The windows along one axis."""

    size: int
    stride: int
    pad: int
    dilation: int
    ceil: bool

    def all_hold_elements(self, before: Size, after: Size) -> bool:
        """Whether no window lies in the padding alone; its greatest element would be infinite."""
        if not self.pad and not self.ceil:
            return True
        if not isinstance(before, int) or not isinstance(after, int):
            return False
        starts = range(-self.pad, -self.pad + after * self.stride, self.stride)
        inside = range(0, self.size * self.dilation, self.dilation)
        return all(any(0 <= start + i < before for i in inside) for start in starts)


@dataclass(frozen=True, slots=True)
class Pool:
    """A choice of the greatest or least element.

    Attributes:
        node: The op.
        result: Its node of the elements; ``None`` if somebody reads where they were found too.
        x: What it chooses from.
        axes: The axes along which it does.
        windows: Those along ``axes``; none if whole axes become one element.
        keeps_axes: Whether the result has all axes.
    """

    node: Node
    result: Node | None
    x: Node
    axes: tuple[int, ...]
    windows: tuple[_Window, ...]
    keeps_axes: bool

    def never_empty(self) -> bool:
        """Whether every element of the result is one of the source."""
        assert self.result is not None, "the result is not read alone"
        before = shape_of(self.x)
        if not self.windows:
            return all(is_positive(before[a]) for a in self.axes)
        after = shape_of(self.result)
        pairs = zip(self.axes, self.windows, strict=True)
        return all(w.all_hold_elements(before[axis], after[axis]) for axis, w in pairs)

    def forward(self, block: Block) -> Moved:
        """Take parameters, of which every chosen-from axis has one block, to the result."""
        for axis in self.axes:
            block = with_axis(block, axis, None)
        return Moved(block, keep) if self.keeps_axes else squeezed(block, self.axes)

    def again(self, mover: Mover, value: Any) -> Any:
        """Choose from other values of the same shape."""
        if not self.windows:
            return mover.call(overload_of(self.node), value, list(self.axes), self.keeps_axes)
        op = _WINDOWS[overload_of(self.node)][1]  # type: ignore[index]
        windows = self.windows
        if len(windows) > 1:
            return mover.call(op, value, *_lists(windows))
        # In one dimension there is no form for integers.
        flat = _Window(1, 1, 0, 1, windows[0].ceil)
        rows = mover.call(aten.unsqueeze.default, value, -2)
        pooled = mover.call(op, rows, *_lists((flat, *windows)))
        return mover.call(aten.squeeze.dims, pooled, [-2])


def as_pool(node: Node) -> Pool | None:
    """View a call of one of ``POOLS``; ``None`` if an argument of it is not a number."""
    a: dict[str, Any] = dict(arguments(node))
    x = node_of(a["self"])
    rank = len(shape_of(x))
    if is_call(node, *_WHOLE):
        axes = tuple(sorted({axis % rank for axis in a["dim"]})) or tuple(range(rank))
        return Pool(node, node, x, axes, (), bool(a["keepdim"])) if rank else None
    count, _, indexed = _WINDOWS[overload_of(node)]  # type: ignore[index]
    windows = _windows(a, count)
    if windows is None:
        return None
    axes = tuple(range(rank - count, rank))
    return Pool(node, _elements(node) if indexed else node, x, axes, windows, keeps_axes=True)


def _elements(node: Node) -> Node | None:
    """Return the one item that is read, if it is the first."""
    (item,) = node.users if len(node.users) == 1 else (None,)
    first = item is not None and item.target is operator.getitem and item.args[1] == 0
    return item if first else None


def _windows(a: dict[str, Any], count: int) -> tuple[_Window, ...] | None:
    sizes = _spread(a["kernel_size"], count)
    fields = [
        sizes,
        _spread(a["stride"], count) or sizes,
        _spread(a["padding"], count),
        _spread(a["dilation"], count),
    ]
    if any(not isinstance(n, int) for field in fields for n in field):
        return None
    ceil = bool(a["ceil_mode"])
    rows = zip(*fields, strict=True)
    return tuple(_Window(size, stride, pad, apart, ceil) for size, stride, pad, apart in rows)


def _spread(value: Any, count: int) -> list[Any]:
    """One number stands for all axes."""
    numbers = list(value) if isinstance(value, (list, tuple)) else [value]
    return numbers * count if len(numbers) == 1 else numbers


def _lists(windows: Sequence[_Window]) -> tuple[Any, ...]:
    fields = zip(*((w.size, w.stride, w.pad, w.dilation) for w in windows), strict=True)
    return (*map(list, fields), windows[0].ceil)
