"""Fuse a dequantize and a quantize: ``quantize(dequantize(q))`` becomes a requantize."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import Requantize
from qfuse.ir.ops.views import tensor_of
from qfuse.optimize.propagate.qdq_pair import quantize_pair
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule


@dataclass(frozen=True, slots=True)
class FuseRequantizeSite:
    """A quantize and the dequantize that is its operand."""

    made: Requantize


class FuseRequantize(Rule[FuseRequantizeSite]):
    """``quantize(dequantize(q, a), b)`` becomes ``requantize(q, a, b)``.

    Before::

        q -> dequantize(a) -> quantize(b) -> ...

    After::

        q -> requantize(a, b) -> ...

    It rounds to the float dtype between the two as they did: its arguments hold both specs.

    Several quantizes may share the dequantize: each becomes a requantize, and the dequantize is
    erased.

    Refuses: a dequantize with a user that is not a quantize.
    """

    name = "fuse-requantize"
    anchors: ClassVar[tuple[OpOverload, ...]] = (ops.quantize,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> FuseRequantizeSite | Miss:
        """Match a quantize of a dequantize whose users are all quantizes."""
        pair = quantize_pair(node)
        if isinstance(pair, Miss):
            return pair
        quantize, dequantize = pair
        # For another user the dequantize stays, and its float result is there to quantize.
        users = dequantize.node.users
        others = sorted({op_name(user) for user in users if not is_call(user, ops.quantize)})
        if others:
            text = "the float values are also used by {}"
            return Miss(MissCode.SHARED, dequantize.node, text, ", ".join(others), progress=2)
        made = Requantize(node, dequantize.q, dequantize.params, quantize.params)
        return FuseRequantizeSite(made)

    def rewrite(self, site: FuseRequantizeSite, rw: Rewriter) -> None:
        """Replace the quantize; the dequantize is erased after its last user."""
        node = site.made.node
        rw.replace(node, rw.replay(site.made.overload, site.made.call_args(), {}, tensor_of(node)))
