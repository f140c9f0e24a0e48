"""Max pools of 8-bit values, in an integer dtype that torch can pool in every layout.

torch's channels-last max pools keep the position of a maximum in the dtype of the values, and raise
if an image has more positions than the dtype can count.
"""

from __future__ import annotations

import torch

from qfuse.ir.dtypes import BYTES
from qfuse.ir.graph.schema import arguments, is_call, overload_of
from qfuse.ir.graph.stage_graph import CLAIM_META
from qfuse.ir.ops.views import dtype_of
from qfuse.rewrite.prelude import Exactness, Node, Rewriter
from qfuse.rewrite.session import RewriteSession

aten = torch.ops.aten

_POOLS = (aten.max_pool2d.default, aten.max_pool3d.default)


def widen_max_pools(session: RewriteSession) -> None:
    """Pool 8-bit values as int32; a compiler fuses both casts into the loop of the pool.

    Pools that a backend claimed stay as they are.
    """
    for node in list(session.program.graph.nodes):
        is_claimed = CLAIM_META in node.meta
        if is_call(node, *_POOLS) and dtype_of(node) in BYTES and not is_claimed:
            session.rewrite_always("widen-max-pool", node, _Widen(node), proof=Exactness.EXACT)


class _Widen:
    """Replaces one pool."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def __call__(self, rw: Rewriter) -> None:
        node, cast = self._node, aten._to_copy.default
        op, dtype = overload_of(node), dtype_of(node)
        assert op is not None, "a max pool is an op"
        x, *settings = arguments(node).values()
        wide = rw.call(cast, x, dtype=torch.int32)
        pooled = rw.call(op, wide, *settings)
        # A window of padding alone holds the least value of the dtype.
        known = rw.call(aten.clamp_min.default, pooled, torch.iinfo(dtype).min)
        rw.replace(node, rw.call(cast, known, dtype=dtype))
