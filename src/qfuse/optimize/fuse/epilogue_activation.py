"""Fuse an activation into the epilogue of a fused product."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops.epilogue import Act, Epilogue
from qfuse.ir.ops.product import FusedProduct
from qfuse.optimize.fuse.epilogue import append_op, open_product
from qfuse.patterns.activations import (
    ACTIVATION_OPS,
    SQUARE_OPS,
    activated,
    activation_of,
    squared,
)
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule


@dataclass(frozen=True, slots=True)
class ActivationSite:
    """A fused op and the activation that is its only user."""

    fused: FusedProduct
    node: Node
    act: Act


class FuseActivation(Rule[ActivationSite]):
    """``act(qfuse.linear(...))`` becomes ``qfuse.linear(..., epilogue="act(...)")``.

    The same for ``qfuse.convolution`` and ``qfuse.matmul``. The square of a ReLU, in any spelling,
    is one activation.

    Refuses: an op with other users; bounds or slopes that are not numbers; a clamp with bounds that
    cross or are NaN; the square of anything but a ReLU.
    """

    name = "fuse-activation"
    anchors: ClassVar[tuple[OpOverload, ...]] = (*ACTIVATION_OPS, *SQUARE_OPS)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> ActivationSite | Miss:
        """Match an activation whose input is an open fused op."""
        if is_call(node, *SQUARE_OPS):
            return _square_site(node)
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


def _square_site(node: Node) -> ActivationSite | Miss:
    """Match the square of a fused op whose last epilogue op is a ReLU."""
    source = squared(node)
    if source is None:
        return Miss(MissCode.PATTERN, node, "it squares nothing", progress=0)
    fused = open_product(source, node)
    if isinstance(fused, Miss):
        return fused
    steps = fused.epilogue.ops
    if not steps or steps[-1] != Act("relu"):
        text = "it squares a value that is not the result of a ReLU"
        return Miss(MissCode.PATTERN, node, text, progress=3)
    # The two are one op of the epilogue, so that kernels have one function for it.
    before = replace(fused, epilogue=Epilogue(steps[:-1]))
    return ActivationSite(before, node, Act("squared_relu"))
