"""Fold views and computations of constant weights and parameters into constants."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.qdq import Dequantize, as_dequantize
from qfuse.normalize.match.constants import derived, evaluated
from qfuse.normalize.match.quantized_values import moved_constant
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule


@dataclass(frozen=True, slots=True)
class FoldStoredSite:
    """A dequantize, and each operand's folded constant with the constant that it comes from."""

    dequantize: Dequantize
    q: tuple[Node, torch.Tensor] | None
    scale: tuple[Node, torch.Tensor] | None
    zero_point: tuple[Node, torch.Tensor] | None


class FoldStored(Rule[FoldStoredSite]):
    """``dequantize(t(q), view(scale))`` of constants uses folded constants instead.

    Before::

        const q -> t ----------+
        const scale -> view ---+-> qfuse.dequantize

    After::

        const q_t, const scale_view -> qfuse.dequantize

    Exact. A view of ``q`` shares the memory of the old constant; a computed ``q``, such as unpacked
    nibbles or a weight that the graph quantizes, is computed once, at compile time.

    Refuses: operands that are constants already, or that are computed at run time or at random.
    """

    name = "fold-stored"
    anchors: ClassVar[tuple[OpOverload, ...]] = (ops.dequantize,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> FoldStoredSite | Miss:
        """Match a dequantize with an operand that is a view of or computed from constants."""
        dequantize = as_dequantize(node)
        assert dequantize is not None, "the anchor is a dequantize"
        params = dequantize.params
        q = _stored(dequantize.q)
        scale, zero = _computed(params.scale), _computed(params.zero_point)
        if q is None and scale is None and zero is None:
            text = "no operand is a view of a constant"
            return Miss(MissCode.NOT_CONSTANT, node, text, progress=0)
        return FoldStoredSite(dequantize, q, scale, zero)

    def rewrite(self, site: FoldStoredSite, rw: Rewriter) -> None:
        """Add the folded constants."""
        params = site.dequantize.params
        q, scale, zero = site.dequantize.q, params.scale, params.zero_point
        if site.q is not None:
            q = derived(rw, *site.q, "stored")
        if site.scale is not None:
            scale = derived(rw, *site.scale, "scale")
        if site.zero_point is not None:
            zero = derived(rw, *site.zero_point, "zero_point")
        folded = replace(params, scale=scale, zero_point=zero)
        new = rw.call(ops.dequantize, *folded.call_args(q))
        rw.replace(site.dequantize.node, new)


def _stored(node: Node) -> tuple[Node, torch.Tensor] | None:
    if constant_of(node) is not None:
        return None
    moved = moved_constant(node)
    if moved is not None:
        return moved
    value = evaluated(node)
    return None if value is None else (node, value)


def _computed(node: Node | None) -> tuple[Node, torch.Tensor] | None:
    if node is None or constant_of(node) is not None:
        return None
    value = constant_value(node)
    if value is None:
        value = evaluated(node)
    if value is None:
        return None
    moved = moved_constant(node)
    # A small computed value must not keep a large constant alive.
    return (node, value.clone()) if moved is None else moved
