"""Reductions of 8-bit integers, in a dtype that Inductor reduces right.

Inductor reduces a row with whole vectors of 8-bit integers, also where fewer were read or computed,
as along axes of fewer than 64 elements: the least of the values 3, 4, 5 is the 0 of an unused lane.
"""

from __future__ import annotations

import operator

import torch
from torch._ops import OpOverload

from qfuse.ir.aten import aten
from qfuse.ir.dtypes import BYTES
from qfuse.ir.graph.schema import arguments, is_call, overload_of
from qfuse.ir.graph.stage_graph import CLAIM_META
from qfuse.ir.ops.views import dtype_of, node_of
from qfuse.lower.operands.checks import typed
from qfuse.rewrite.prelude import Exactness, Node, Rewriter
from qfuse.rewrite.session import RewriteSession

_SELECTIONS: tuple[OpOverload, ...] = (
    aten.amax.default,
    aten.amin.default,
    aten.aminmax.default,
    aten.argmax.default,
    aten.argmin.default,
    aten.max.default,
    aten.max.dim,
    aten.min.default,
    aten.min.dim,
)
# These have a dtype of their own, in which they compute.
_SUMS: tuple[OpOverload, ...] = (
    aten.prod.default,
    aten.prod.dim_int,
    aten.sum.default,
    aten.sum.dim_IntList,
)
# Of uint8 they give uint8; Inductor's code gives a bool.
_ANY: tuple[OpOverload, ...] = (aten.any.default, aten.any.dim, aten.any.dims)


def widen_byte_reductions(session: RewriteSession) -> None:
    """Reduce 8-bit integers as int32, or as bool; a compiler fuses the casts into the loop.

    Ops that a backend claimed stay as they are.
    """
    for node in list(session.program.graph.nodes):
        dtype = _dtype(node)
        if dtype in BYTES and CLAIM_META not in node.meta:
            edit = _Widen(node, dtype)
            session.rewrite_always("widen-byte-reduction", node, edit, proof=Exactness.EXACT)


def _dtype(node: Node) -> torch.dtype | None:
    """Return the dtype that a reduction computes in, ``None`` for other nodes."""
    if is_call(node, *_SELECTIONS):
        return dtype_of(node_of(arguments(node)["self"]))
    return dtype_of(node) if is_call(node, *_SUMS, *_ANY) else None


class _Widen:
    """Replaces one reduction."""

    def __init__(self, node: Node, dtype: torch.dtype) -> None:
        self._node = node
        self._dtype = dtype

    def __call__(self, rw: Rewriter) -> None:
        node, op = self._node, overload_of(self._node)
        assert op is not None, "a reduction is an op"
        settings = dict(arguments(node))
        x = typed(node_of(settings.pop("self")), self._dtype, rw)
        if "dtype" in settings:
            settings["dtype"] = torch.int32
        within = torch.bool if is_call(node, *_ANY) else torch.int32
        wide = rw.call(op, typed(x, within, rw), **settings)
        if isinstance(node.meta["val"], torch.Tensor):
            rw.replace(node, self._narrowed(wide, node, rw))
            return
        for item in list(node.users):
            index = item.args[1]
            assert item.target is operator.getitem, "the users of several results are its items"
            assert isinstance(index, int), "an item has a number"
            rw.replace(item, self._narrowed(rw.item(wide, index), item, rw))

    def _narrowed(self, wide: Node, old: Node, rw: Rewriter) -> Node:
        """Return a result in its dtype; indices have it already."""
        return typed(wide, dtype_of(old), rw)
