"""Fuse an activation into the epilogue of a fused product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qfuse.ir.ops.epilogue import Act
from qfuse.ir.ops.product import FusedProduct
from qfuse.optimize.fuse.epilogue import append_op, open_product
from qfuse.patterns.activations import ACTIVATION_OPS, activated, activation_of
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule


@dataclass(frozen=True, slots=True)
class ActivationSite:
    """A fused op and the activation that is its only user."""

    fused: FusedProduct
    node: Node
    act: Act


class FuseActivation(Rule[ActivationSite]):
    """``act(qfuse.linear(...))`` becomes ``qfuse.linear(..., epilogue="act(...)")``.

    The same for ``qfuse.convolution`` and ``qfuse.matmul``.

    Refuses: an op with other users; bounds or slopes that are not numbers; a clamp with bounds that
    cross or are NaN.
    """

    name = "fuse-activation"
    anchors: ClassVar[tuple[OpOverload, ...]] = ACTIVATION_OPS
    exactness = Exactness.EXACT

    def match(self, node: Node) -> ActivationSite | Miss:
        """Match an activation whose input is an open fused op."""
        fused = open_product(activated(node), node)
        if isinstance(fused, Miss):
            return fused
        act = activation_of(node)
        if act is None:
            text = "{} with these arguments is not an activation of the fused op"
            return Miss(MissCode.ARGUMENT, node, text, node.target, progress=3)
        return ActivationSite(fused, node, act)

    def rewrite(self, site: ActivationSite, rw: Rewriter) -> None:
        """Replace the activation by the extended op."""
        append_op(site.fused, site.node, site.act, rw)
