"""Casts between float types, as rules that look through them see them."""

from __future__ import annotations

import torch

from qfuse.ir.dtypes import REALS, widens
from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops import casts
from qfuse.ir.ops.views import dtype_of, node_of, tensor_of
from qfuse.optimize.match.move_qparams import same_strides
from qfuse.rewrite.prelude import Node, arguments, aten


def besides_dtype(node: Node) -> list[str]:
    """Return what an ``aten._to_copy`` changes besides the dtype."""
    a = arguments(node)
    source = node_of(a["self"]).meta["val"]
    same = {
        "layout": torch.strided,
        "device": source.device,
        "memory_format": torch.preserve_format,
    }
    changed = [k for k, v in same.items() if a.get(k) is not None and a[k] != v]
    return [*changed, "pinning"] if a.get("pin_memory") else changed


def cast_source(node: Node) -> Node | None:
    """Return what ``node`` casts from one float type to another, or to the same; else ``None``.

    A copy of the same type that makes something dense which is not has numbers that lie in another
    way: a library computes functions of them, and sums, by other formulas. It is no cast.
    """
    source = casts.cast_source(node)
    if is_call(node, aten.type_as.default):
        source = node_of(arguments(node)["self"])
    if source is None or not {dtype_of(source), dtype_of(node)} <= set(REALS):
        return None
    moves = dtype_of(source) == dtype_of(node) and not same_strides(
        tensor_of(source), tensor_of(node)
    )
    return None if moves else source


def exact_source(node: Node) -> tuple[Node, list[Node]]:
    """Look through casts that keep every number; return what is behind them, and them."""
    crossed: list[Node] = []
    while (source := cast_source(node)) is not None:
        if not widens(dtype_of(source), dtype_of(node)):
            break
        crossed.append(node)
        node = source
    return node, crossed
