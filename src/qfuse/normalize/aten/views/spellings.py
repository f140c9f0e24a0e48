"""Composite movements, and their expansions into movements that parameters can follow.

An expansion calls ops through a :class:`Speller`, so that it can be tried on fake tensors before it
is added to a graph. It returns ``None`` for arguments that it does not support.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from qfuse.ir.ops.views import dtype_of, node_of, shape_of
from qfuse.ir.sizes import same_size
from qfuse.rewrite.prelude import Node, OpOverload, arguments, aten


class Speller(Protocol):
    """Calls ops on nodes, or on their fake tensors."""

    def call(self, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        """Call an op; nodes may be among the arguments."""

    def instead_of(self, node: Node, op: OpOverload, *args: Any) -> Any:
        """Call an op whose result is exactly that of ``node``, including strides."""

    def sizes(self, node: Node, count: int) -> list[Any]:
        """Return the first ``count`` sizes of a node, as arguments of an op."""


Spelling: TypeAlias = Callable[[Speller, Node], Any]


def _tile(s: Speller, node: Node) -> Any:
    """Missing counts are 1."""
    a = _args(node)
    x, counts = node_of(a["self"]), list(a["dims"])
    return s.call(aten.repeat.default, x, [1] * (len(shape_of(x)) - len(counts)) + counts)


def _pad(s: Speller, node: Node) -> Any:
    """A padding with a number, 0 by default."""
    a = _args(node)
    if a["mode"] != "constant":
        return None
    value = 0 if a["value"] is None else a["value"]
    # Inferring the type again would treat symbolic sizes as numbers.
    return s.instead_of(node, aten.constant_pad_nd.default, a["self"], list(a["pad"]), value)


def _fliplr(s: Speller, node: Node) -> Any:
    return s.call(aten.flip.default, _args(node)["self"], [1])


def _flipud(s: Speller, node: Node) -> Any:
    return s.call(aten.flip.default, _args(node)["self"], [0])


def _rot90(s: Speller, node: Node) -> Any:
    """Quarter turns: a flip, a transposition or both."""
    a = _args(node)
    x, (first, second) = a["self"], a["dims"]
    match a["k"] % 4:
        case 1:
            return s.call(aten.transpose.int, s.call(aten.flip.default, x, [second]), first, second)
        case 2:
            return s.call(aten.flip.default, x, [first, second])
        case 3:
            return s.call(aten.transpose.int, s.call(aten.flip.default, x, [first]), first, second)
        case _:
            return s.call(aten.clone.default, x, memory_format=torch.contiguous_format)


def _cat(s: Speller, node: Node) -> Any:
    a = _args(node)
    return s.instead_of(node, aten.cat.default, list(a["tensors"]), a["dim"])


def _stack_along(axis: int) -> Spelling:
    """``hstack`` and similar ops, of tensors that have the axis already."""

    def spell(s: Speller, node: Node) -> Any:
        tensors = list(_args(node)["tensors"])
        rank = len(shape_of(tensors[0]))
        # `vstack` and `dstack` first give vectors new axes, and `hstack` joins vectors along axis
        # 0.
        if rank < max(axis + 1, 2) or any(len(shape_of(t)) != rank for t in tensors):
            return None
        return s.call(aten.cat.default, tensors, axis)

    return spell


def _take_along_dim(s: Speller, node: Node) -> Any:
    """``gather``, unless axes of size 1 are broadcast first."""
    a = _args(node)
    x, index, axis = node_of(a["self"]), node_of(a["indices"]), a["dim"]
    before, at = shape_of(x), shape_of(index)
    # Without an axis it flattens; with other ranks or sizes it broadcasts, as `gather` does not.
    if axis is None or len(before) != len(at) or dtype_of(index) is not torch.int64:
        return None
    others = [i for i in range(len(before)) if i != axis % len(before)]
    if not all(same_size(before[i], at[i]) for i in others):
        return None
    return s.call(aten.gather.default, x, axis, index)


def _pixel_shuffle(s: Speller, node: Node) -> Any:
    """``pixel_shuffle``: channels become neighbouring rows and columns."""
    a = _args(node)
    x, r = node_of(a["self"]), a["upscale_factor"]
    known = _image(x)
    if known is None:
        return None
    lead, (c, h, w) = s.sizes(x, len(shape_of(x)) - 3), known
    inner = [c // (r * r), r, r, h, w]
    return _through(s, x, lead, inner, (0, 3, 1, 4, 2), [c // (r * r), h * r, w * r])


def _pixel_unshuffle(s: Speller, node: Node) -> Any:
    """``pixel_unshuffle``: neighbouring rows and columns become channels."""
    a = _args(node)
    x, r = node_of(a["self"]), a["downscale_factor"]
    known = _image(x)
    if known is None:
        return None
    lead, (c, h, w) = s.sizes(x, len(shape_of(x)) - 3), known
    inner = [c, h // r, r, w // r, r]
    return _through(s, x, lead, inner, (0, 2, 4, 1, 3), [c * r * r, h // r, w // r])


def _channel_shuffle(s: Speller, node: Node) -> Any:
    """``channel_shuffle``: channels of the groups are interleaved."""
    a = _args(node)
    x, groups = node_of(a["self"]), a["groups"]
    rank, c = len(shape_of(x)), shape_of(x)[1]
    # Their quotient is an argument of a view, where a symbol would need a node.
    if not isinstance(c, int):
        return None
    batch, _, *rest = s.sizes(x, rank)
    return _through(
        s, x, [batch], [groups, c // groups, *rest], (1, 0, *range(2, rank)), [c, *rest]
    )


def _through(
    s: Speller,
    x: Node,
    lead: list[Any],
    inner: list[Any],
    order: Sequence[int],
    last: list[Any],
) -> Any:
    """View, permute, copy, view again; leading axes stay."""
    turned = [*range(len(lead)), *(len(lead) + axis for axis in order)]
    seen = s.call(aten.reshape.default, x, [*lead, *inner])
    moved = s.call(aten.permute.default, seen, turned)
    # The second view needs row-major memory; a source with other strides is refused in `match`.
    dense = s.call(aten.clone.default, moved, memory_format=torch.contiguous_format)
    return s.call(aten.view.default, dense, [*lead, *last])


def _image(x: Node) -> tuple[int, int, int] | None:
    """Return channels, height and width, if they are known."""
    known = [size for size in shape_of(x)[-3:] if isinstance(size, int)]
    return (known[0], known[1], known[2]) if len(known) == 3 else None  # noqa: PLR2004


def _args(node: Node) -> dict[str, Any]:
    """Return the arguments of an ATen op by the names in its schema."""
    return dict(arguments(node))


SPELLINGS: dict[OpOverload, Spelling] = {
    aten.tile.default: _tile,
    aten.pad.default: _pad,
    aten.fliplr.default: _fliplr,
    aten.flipud.default: _flipud,
    aten.rot90.default: _rot90,
    aten.concat.default: _cat,
    aten.concatenate.default: _cat,
    aten.hstack.default: _stack_along(1),
    aten.vstack.default: _stack_along(0),
    aten.dstack.default: _stack_along(2),
    aten.take_along_dim.default: _take_along_dim,
    aten.pixel_shuffle.default: _pixel_shuffle,
    aten.pixel_unshuffle.default: _pixel_unshuffle,
    aten.channel_shuffle.default: _channel_shuffle,
    aten.native_channel_shuffle.default: _channel_shuffle,
}
"""The composite movements, and their expansions."""
