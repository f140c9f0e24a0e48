"""Max pooling, ``amax`` and ``amin``: ops that return one of the elements of a window or axis."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.movement.base import Moved, Mover, keep, squeezed, with_axis
from qfuse.ir.ops.qdq import Dequantize
from qfuse.ir.ops.views import dtype_of, node_of, shape_of, tensor_of
from qfuse.ir.quant.block import covers
from qfuse.ir.quant.spec import Block
from qfuse.ir.sizes import Size, is_positive, is_row_major
from qfuse.optimize.commute.base import Commutes, Crossing, moved, vanishes
from qfuse.optimize.match.dequant_table import table_of
from qfuse.rewrite.prelude import Miss, MissCode, Node, OpOverload, arguments, aten

# Per op: its number of axes, the op without indices, whether it returns indices.
_WINDOWS: dict[OpOverload, tuple[int, OpOverload, bool]] = {
    aten.max_pool1d.default: (1, aten.max_pool2d.default, False),
    aten.max_pool2d.default: (2, aten.max_pool2d.default, False),
    aten.max_pool3d.default: (3, aten.max_pool3d.default, False),
    aten.max_pool1d_with_indices.default: (1, aten.max_pool2d.default, True),
    aten.max_pool2d_with_indices.default: (2, aten.max_pool2d.default, True),
    aten.max_pool3d_with_indices.default: (3, aten.max_pool3d.default, True),
}
_WHOLE: tuple[OpOverload, ...] = (aten.amax.default, aten.amin.default)


@dataclass(frozen=True, slots=True)
class _Window:
    """The windows along one axis."""

    size: int
    stride: int
    pad: int
    dilation: int
    ceil: bool

    def all_hold_elements(self, before: Size, after: Size) -> bool:
        """Whether no window lies in the padding alone; its maximum would be infinite."""
        # torch lets every window begin before the end of the axis, also if it rounds up. Without
        # dilation a window reaches over a padding that is smaller than itself.
        if not self.pad or (self.dilation == 1 and self.pad < self.size):
            return True
        if not isinstance(before, int) or not isinstance(after, int):
            return False
        # A dilated window can step over a short axis: with a size of 2,
        # dilation 2 and padding 1, it reads the indices -1 and 1 of an axis of
        # size 1. The maximum is then -inf, for which no quantized value stands.
        starts = range(-self.pad, -self.pad + after * self.stride, self.stride)
        inside = range(0, self.size * self.dilation, self.dilation)
        return all(any(0 <= start + i < before for i in inside) for start in starts)


@dataclass(frozen=True, slots=True)
class Pool(Commutes):
    """An op that selects the largest or smallest element: max pooling, ``amax`` and ``amin``.

    ``max_pool(dequantize(q, s))`` is ``dequantize(max_pool(q), s)``. Dequantization is monotonic,
    so the maximum is the same element. Padding is below every value in both. Refuses: windows over
    several blocks; a window with only padding; indices that have users; parameters that are
    computed at run time, which may not be monotonic; a dequantize with other users.

    Attributes:
        node: The op.
        result: The node of the elements.
        source: Its operand.
        axes: The axes that are reduced.
        windows: The windows along ``axes``; empty if whole axes are reduced.
        keeps_axes: Whether the result has all axes.
    """

    ops: ClassVar[tuple[OpOverload, ...]] = (*_WINDOWS, *_WHOLE)
    folds: ClassVar[bool] = True

    node: Node
    result: Node
    source: Node
    axes: tuple[int, ...]
    windows: tuple[_Window, ...]
    keeps_axes: bool

    @classmethod
    def of(cls, node: Node) -> Pool | Miss | None:
        """View a pool; miss one with arguments that are not numbers, or whose indices are used."""
        if not is_call(node, *cls.ops):
            return None
        a: dict[str, Any] = dict(arguments(node))
        x = node_of(a["self"])
        rank = len(shape_of(x))
        unknown = Miss(
            MissCode.ARGUMENT, node, "an argument of {} is not known", op_name(node), progress=2
        )
        if is_call(node, *_WHOLE):
            # An empty list of axes means all of them.
            axes = tuple(sorted({axis % rank for axis in a["dim"]})) or tuple(range(rank))
            return cls(node, node, x, axes, (), bool(a["keepdim"])) if rank else unknown
        count, _, indexed = _WINDOWS[overload_of(node)]  # type: ignore[index]
        windows = _windows(a, count)
        if windows is None:
            return unknown
        result = _elements(node) if indexed else node
        # The pool of quantized values, see `_WINDOWS`, returns no indices.
        if result is None:
            text = "its indices are also used"
            return Miss(MissCode.SHARED, node, text, progress=2)
        return cls(node, result, x, tuple(range(rank - count, rank)), windows, keeps_axes=True)

    def never_empty(self) -> bool:
        """Whether every element of the result is one of the source."""
        before, after = shape_of(self.source), shape_of(self.result)
        if not self.windows:
            return all(is_positive(before[a]) for a in self.axes)
        pairs = zip(self.axes, self.windows, strict=True)
        return all(w.all_hold_elements(before[axis], after[axis]) for axis, w in pairs)

    def forward(self, block: Block) -> Moved:
        """Move parameters, which have one block along every reduced axis, to the result."""
        for axis in self.axes:
            block = with_axis(block, axis, None)
        return Moved(block, keep) if self.keeps_axes else squeezed(block, self.axes)

    def apply(self, mover: Mover, value: Any) -> Any:
        """Pool another tensor of the same shape."""
        if not self.windows:
            return mover.call(overload_of(self.node), value, list(self.axes), self.keeps_axes)
        op = _WINDOWS[overload_of(self.node)][1]  # type: ignore[index]
        windows = self.windows
        if len(windows) > 1:
            return mover.call(op, value, *_lists(windows))
        # There is no one-dimensional max pooling for integers, so an axis of size one is added.
        flat = _Window(1, 1, 0, 1, windows[0].ceil)
        rows = mover.call(aten.unsqueeze.default, value, -2)
        pooled = mover.call(op, rows, *_lists((flat, *windows)))
        return mover.call(aten.squeeze.dims, pooled, [-2])

    def _apply_to_quantized(self, mover: Mover, value: Any, dtype: torch.dtype) -> Any:
        """Pool quantized values of ``dtype``, in an integer dtype that torch can pool.

        torch's channels-last max pools keep the position of a maximum in the dtype of the values,
        and raise if an image has more positions than the dtype can count.
        """
        counts = dtype.is_floating_point or dtype.itemsize > 1
        if not self.windows or counts or is_row_major(tensor_of(self.source)):
            return self.apply(mover, value)
        wide = mover.call(aten._to_copy.default, value, dtype=torch.int32)
        return mover.call(aten._to_copy.default, self.apply(mover, wide), dtype=dtype)

    def sink(self, operands: tuple[Dequantize, ...]) -> Crossing | Miss:
        """Pool the quantized values, and dequantize the result."""
        (dequantize,) = operands
        params = dequantize.params
        for axis in self.axes:
            # With scales 0.1 and 1.0 in one window, 50 stands for 5.0 and 20 for 20.0: the larger
            # quantized value is the smaller number.
            if not covers(params.spec.block[axis], shape_of(self.source)[axis]):
                text = "{} pools elements of several blocks along axis {}"
                details = op_name(self.node), axis
                return Miss(MissCode.GRANULARITY, self.node, text, *details, progress=2)
        if not self.never_empty():
            text = "a window of {} may hold only padding"
            return Miss(MissCode.SHAPE, self.node, text, op_name(self.node), progress=3)
        # With a negative scale the maximum of the quantized values is the minimum of the numbers.
        table = table_of(params)
        if isinstance(table, Miss):
            return table
        q_dtype = dtype_of(dequantize.q)
        return Crossing(
            (moved(self.result, params, [self.forward(params.spec.block)]),),
            lambda mover, values: [self._apply_to_quantized(mover, values[0], q_dtype)],
        )

    def shares_with(self, user: Node) -> bool:
        """Any user may stay if no dequantize remains below."""
        del user
        return vanishes(self.node)


def _elements(node: Node) -> Node | None:
    """Return the only item in use, if it is the first."""
    (item,) = node.users if len(node.users) == 1 else (None,)
    first = item is not None and item.target is operator.getitem and item.args[1] == 0
    return item if first else None


def _windows(a: dict[str, Any], count: int) -> tuple[_Window, ...] | None:
    sizes = _spread(a["kernel_size"], count)
    fields = [
        sizes,
        # torch's default for the stride is the size of the window, passed as an empty list.
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
    """Return one number per axis; a single number applies to all."""
    numbers = list(value) if isinstance(value, (list, tuple)) else [value]
    return numbers * count if len(numbers) == 1 else numbers


def _lists(windows: Sequence[_Window]) -> tuple[Any, ...]:
    fields = zip(*((w.size, w.stride, w.pad, w.dilation) for w in windows), strict=True)
    return (*map(list, fields), windows[0].ceil)
