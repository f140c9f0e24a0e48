"""Tables of quantized values that are indexed by a tensor, ``table[ids]``."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from qfuse.cost import hint_of
from qfuse.ir.dtypes import BYTES
from qfuse.ir.graph.schema import arguments, is_call
from qfuse.ir.graph.stage_graph import SITE_META, constant_of, site_of
from qfuse.ir.ops.value_range import bounds_of
from qfuse.ir.ops.views import dtype_of, node_of, shape_of, tensor_of
from qfuse.ir.sizes import is_row_major
from qfuse.rewrite.prelude import Exactness, Node, Rewriter, aten
from qfuse.rewrite.session import RewriteSession

_MATRIX = 2
_IDS = (torch.int64, torch.int32)
# Below, the two ops on the indices take longer than the copy of single elements.
_LEAST_ELEMENTS = 1 << 14


def lower_lookups(session: RewriteSession) -> None:
    """Replace ``table[ids]`` of a large result by an op that copies whole rows.

    torch indexes element by element, which takes up to 15 times as long. Unlike the ops that copy
    rows, indexing counts negative numbers from the end, and so do these calls: ``ids + n * (ids <
    0)``. Numbers outside of the table are an error as before.
    """
    for node in list(session.program.graph.nodes):
        found = _site(node)
        if found is not None:
            session.rewrite("lower-lookup", node, found, proof=Exactness.EXACT)


@dataclass(frozen=True, slots=True)
class _Lookup:
    """Replaces one lookup in a constant table."""

    node: Node
    table: Node
    ids: Node

    def __call__(self, rw: Rewriter) -> None:
        ids, count = self.ids, shape_of(self.table)[0]
        bounds = bounds_of(ids)
        if bounds is None or bounds[0] < 0:
            negative = rw.call(aten.lt.Scalar, ids, 0)
            ids = rw.call(aten.add.Tensor, ids, negative, alpha=count)
        if len(shape_of(self.table)) == _MATRIX:
            rows = rw.call(aten.embedding.default, self.table, ids)
        else:
            rows = rw.call(aten.index_select.default, self.table, 0, ids)
        rows.meta[SITE_META] = site_of(self.node)
        rw.replace(self.node, rows)


def _site(node: Node) -> _Lookup | None:
    if not is_call(node, aten.index.Tensor) or dtype_of(node) not in BYTES:
        return None
    a = arguments(node)
    table, indices = node_of(a["self"]), a["indices"]
    assert isinstance(indices, (list, tuple)), "indices are a list"
    ids = indices[0]
    if len(indices) != 1 or not isinstance(ids, Node) or dtype_of(ids) not in _IDS:
        return None
    # `index_select` takes a list of indices, `embedding` a tensor of them, but only of rows.
    ranks = len(shape_of(table)), len(shape_of(ids))
    if constant_of(table) is None or (ranks[0] != _MATRIX and ranks[1] != 1):
        return None
    large = math.prod(map(hint_of, shape_of(node))) >= _LEAST_ELEMENTS
    # Indexing may order the axes of its result as those of the indices lie in memory.
    return _Lookup(node, table, ids) if large and is_row_major(tensor_of(node)) else None
