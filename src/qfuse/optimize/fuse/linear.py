"""Fuse ``linear(dequantize(x), dequantize(w), b)`` into one op on quantized values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.ops.epilogue import Epilogue
from qfuse.ir.ops.linear import FusedLinear, Linear, as_linear
from qfuse.ir.ops.views import shape_of
from qfuse.optimize.fuse.epilogue import replace_by
from qfuse.optimize.fuse.operands import Operands, quantized_operands
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule


@dataclass(frozen=True, slots=True)
class LinearSite:
    """A linear whose weight, and possibly activation, is a dequantize."""

    linear: Linear
    operands: Operands


class FuseLinear(Rule[LinearSite]):
    """Fuse the dequantizes of a linear's operands into it.

    Before::

        q -> dequantize --.
        w -> dequantize --+-> aten.linear

    After::

        q, w -> qfuse.linear

    A shared dequantize stays for its other users. An activation that is not quantized stays a
    float operand: the result is a weight-only linear.

    Refuses: a float weight, also one of one entry per output; a weight that is not a constant; a
    weight of another rank than 2.
    """

    name = "fuse-linear"
    anchors: ClassVar[tuple[OpOverload, ...]] = (torch.ops.aten.linear.default,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> LinearSite | Miss:
        """Match a linear with a dequantized constant weight."""
        linear = as_linear(node)
        assert linear is not None, "the anchor is a linear"
        operands = quantized_operands(linear.x, linear.weight)
        if isinstance(operands, Miss):
            return operands
        # `aten.linear` also accepts a vector as its weight, and then drops the last axis.
        rank = len(shape_of(linear.weight))
        if rank != 2:  # noqa: PLR2004
            text = "the weight has rank {}, a linear's has 2"
            return Miss(MissCode.SHAPE, linear.weight, text, rank, progress=3)
        return LinearSite(linear, operands)

    def rewrite(self, site: LinearSite, rw: Rewriter) -> None:
        """Replace the linear; dequantizes without other users are erased."""
        linear, operands = site.linear, site.operands
        fused = FusedLinear(
            linear.node,
            operands.x,
            operands.x_params,
            operands.weight.q,
            operands.weight.params,
            linear.bias,
            None,
            Epilogue(),
            (),
        )
        replace_by(fused, linear.node, rw)
