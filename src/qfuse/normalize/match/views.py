"""Views and casts between the parts of a pattern: matching through them, and reapplying them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx.node import Argument

from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops.view_ops import RESHAPES, SIZED_VIEWS
from qfuse.ir.ops.views import dtype_of, node_of, shape_of, tensor_of
from qfuse.ir.sizes import Size, same_shape, same_size
from qfuse.rewrite import pattern
from qfuse.rewrite.pattern import Step
from qfuse.rewrite.prelude import Node, Rewriter, arguments, aten

VIEWS = (*RESHAPES, aten.alias.default)
"""Ops that keep all elements in row-major order and change at most the shape."""

_STEPS = 12


def view_source(value: object) -> Node | None:
    """Return the operand of ``value``, if it is a view, or ``None``."""
    if not isinstance(value, Node) or not is_call(value, *VIEWS):
        return None
    return node_of(arguments(value)["self"])


VIEW = Step("view", view_source, VIEWS)
"""A view to any shape, as a step of a pattern."""


def _sized_source(node: Node) -> Node | None:
    return node_of(arguments(node)["self"]) if is_call(node, *SIZED_VIEWS) else None


SIZED_VIEW = Step("view", _sized_source, SIZED_VIEWS)
"""A view that names its whole shape."""


def rows_source(value: object) -> Node | None:
    """Return the source of a view that leaves the last axis alone, or ``None``.

    Such a view only merges and splits leading axes, so it commutes with every rowwise op, and
    :func:`reapply_views` can apply it to a tensor with another last axis.
    """
    source = view_source(value)
    if source is None or not isinstance(value, Node):
        return None
    before, after = shape_of(source), shape_of(value)
    # A scalar has no last axis.
    if not before or not after or not same_size(before[-1], after[-1]):
        return None
    if is_call(value, *SIZED_VIEWS, aten.alias.default):
        return source
    if is_call(value, aten.unsqueeze.default):
        return source if _axis(value, len(after)) < len(after) - 1 else None
    if is_call(value, aten.squeeze.dim):
        return source if _axis(value, len(before)) < len(before) - 1 else None
    return None


ROW_VIEW = Step("view", rows_source)
"""A view that leaves the last axis alone."""


def reapply_views(rw: Rewriter, view: Node, y: Node) -> Node:
    """Apply ``view``, for which :func:`rows_source` is not ``None``, to ``y``.

    The leading axes of ``y`` are those of the view's own operand; its last axis may differ.
    """
    if is_call(view, aten.alias.default):
        return y
    if is_call(view, aten.unsqueeze.default):
        return rw.call(aten.unsqueeze.default, y, _axis(view, len(shape_of(view))))
    if is_call(view, aten.squeeze.dim):
        return rw.call(aten.squeeze.dim, y, _axis(view, len(shape_of(y))))
    sizes, last = sizes_argument(view), shape_of(y)[-1]
    if dtype_of(y) == dtype_of(view) and same_size(last, shape_of(view)[-1]):
        # The same rows with the same size: the type of the result is known.
        return rw.replay(aten.view.default, (y, [*sizes[:-1], last]), {}, tensor_of(view))
    return sized_view(rw, y, sizes, last=last)


def sized_view(rw: Rewriter, y: Node, sizes: Sequence[Argument], last: Size | None = None) -> Node:
    """View ``y`` in the given sizes; the last one may be replaced."""
    size: list[Argument] = list(sizes)
    # Callers give a number of features or groups; a symbolic size would need a node.
    if last is not None:
        assert isinstance(last, int), f"the last axis of {y} is not static"
        size[-1] = last
    return rw.call(aten.view.default, y, size)


def sizes_argument(view: Node) -> Sequence[Argument]:
    """Return the shape argument of one of ``SIZED_VIEWS``, as it is written in the graph."""
    a = arguments(view)
    sizes = a["shape"] if "shape" in a else a["size"]
    assert isinstance(sizes, (list, tuple)), f"not a list of sizes: {view.format_node()}"
    return sizes


def with_shape(node: Node, shape: Sequence[Size]) -> Node | None:
    """Return the first of ``node`` and the values that it is a view of that has ``shape``."""
    found: Node | None = node
    for _ in range(_STEPS):
        if found is None or same_shape(shape_of(found), shape):
            return found
        found = view_source(found)
    return None


def transpose_source(value: object, rank: int = 2) -> Node | None:
    """Return the matrix that ``value`` is the transpose of, or ``None``.

    Args:
        value: Any value.
        rank: The axes of the matrix; all but the last two count a batch of matrices.
    """
    if not isinstance(value, Node) or not isinstance(value.meta.get("val"), torch.Tensor):
        return None
    if len(shape_of(value)) != rank:
        return None
    if is_call(value, aten.t.default):
        return node_of(arguments(value)["self"])
    if is_call(value, aten.transpose.int):
        # `transpose` names two axes in any order.
        a = arguments(value)
        axes = (_wrap(a["dim0"], rank), _wrap(a["dim1"], rank))
        return node_of(a["self"]) if set(axes) == {rank - 2, rank - 1} else None
    if is_call(value, aten.permute.default):
        a = arguments(value)
        dims = a["dims"]
        assert isinstance(dims, (list, tuple)), f"not a list of axes: {value.format_node()}"
        turned = [*range(rank - 2), rank - 1, rank - 2]
        return node_of(a["self"]) if [_wrap(d, rank) for d in dims] == turned else None
    return None


def reapply_path(rw: Rewriter, path: pattern.Path, y: Node, dtype: torch.dtype) -> Node:
    """Cast ``y``, which replaces the base of ``path``, to ``dtype``, and reapply the views."""
    if dtype_of(y) != dtype:
        y = rw.call(aten._to_copy.default, y, dtype=dtype)
    for view in path.of(ROW_VIEW):
        y = reapply_views(rw, view, y)
    return y


def _axis(view: Node, rank: int) -> int:
    return _wrap(arguments(view)["dim"], rank)


def _wrap(axis: Argument, rank: int) -> int:
    assert isinstance(axis, int), f"not an axis: {axis!r}"
    return axis % rank if rank else 0
