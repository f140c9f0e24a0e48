"""What the rules share that fuse an op between dequantizes and a quantize."""

from __future__ import annotations

from dataclasses import dataclass

from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.declare import Op
from qfuse.ir.ops.qdq import Quantize, as_quantize
from qfuse.rewrite.prelude import Node, Rewriter


@dataclass(frozen=True, slots=True)
class BetweenSite:
    """A fused op, and what it replaces.

    Attributes:
        fused: The op.
        last: The node whose value it returns: the float op, or the quantize after it.
    """

    fused: Op
    last: Node

    def insert(self, rw: Rewriter) -> None:
        """Insert the op where the last node is."""
        with rw.instead_of(self.last):
            rw.replace(self.last, rw.call(self.fused.overload, *self.fused.call_args()))


def with_quantize_behind(fused: Op, end: Node) -> BetweenSite:
    """Return the op with the quantize of its float result ``end``, if that is its only user."""
    quantize = _static_quantize_behind(end)
    if quantize is None:
        return BetweenSite(fused, end)
    return BetweenSite(fused.with_result_params(quantize.params), quantize.node)


def _static_quantize_behind(node: Node) -> Quantize | None:
    """Return the only user of ``node``, if it quantizes with constants and one level of scales."""
    quantize = as_quantize(next(iter(node.users))) if len(node.users) == 1 else None
    if quantize is None or quantize.params.outer_scale is not None:
        return None
    known = all(constant_of(part) is not None for part in quantize.params.tensors)
    return quantize if known else None
