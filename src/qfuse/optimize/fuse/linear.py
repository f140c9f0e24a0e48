"""Fuse ``linear(dequantize(x), dequantize(w), b)`` into one op on quantized values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.graph.schema import overload_of
from qfuse.ir.graph.stage_graph import constant_of, op_name
from qfuse.ir.ops.epilogue import Epilogue
from qfuse.ir.ops.linear import FusedLinear, Linear, as_linear
from qfuse.ir.ops.qdq import Dequantize, as_dequantize
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.optimize.fuse.epilogue import replace_by
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule

_KNOWN = frozenset({"aten", "prims", "qfuse"})


@dataclass(frozen=True, slots=True)
class LinearSite:
    """A linear whose weight, and possibly activation, is a dequantize."""

    linear: Linear
    act: Dequantize | None
    weight: Dequantize


class FuseLinear(Rule[LinearSite]):
    """Fuse the dequantizes of a linear's operands into it.

    Before::

        q -> dequantize --.
        w -> dequantize --+-> aten.linear

    After::

        q, w -> qfuse.linear

    A shared dequantize stays for its other users. An activation that is not quantized stays a
    float operand: the result is a weight-only linear.

    Refuses: a float weight; a weight that is not a constant; a weight of another rank than 2.
    """

    name = "fuse-linear"
    anchors: ClassVar[tuple[OpOverload, ...]] = (torch.ops.aten.linear.default,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> LinearSite | Miss:
        """Match a linear with a dequantized constant weight."""
        linear = as_linear(node)
        assert linear is not None, "the anchor is a linear"
        weight, act = as_dequantize(linear.weight), as_dequantize(linear.x)
        if weight is None:
            if act is not None:
                return Miss(
                    MissCode.NOT_QUANTIZED,
                    linear.weight,
                    "the activation is quantized but the weight is {}",
                    dtype_of(linear.weight),
                    progress=2,
                )
            return _float_weight(linear.weight)
        if constant_of(weight.q) is None:
            text = "the weight is computed at run time, so it cannot be prepacked"
            return Miss(MissCode.NOT_CONSTANT, weight.q, text, progress=3)
        if len(shape_of(linear.weight)) != 2:  # noqa: PLR2004
            text = "the weight has rank {}, a linear's has 2"
            return Miss(
                MissCode.SHAPE, linear.weight, text, len(shape_of(linear.weight)), progress=3
            )
        return LinearSite(linear, act, weight)

    def rewrite(self, site: LinearSite, rw: Rewriter) -> None:
        """Replace the linear; dequantizes without other users are erased."""
        linear, act, weight = site.linear, site.act, site.weight
        fused = FusedLinear(
            linear.node,
            linear.x if act is None else act.q,
            None if act is None else act.params,
            weight.q,
            weight.params,
            linear.bias,
            None,
            Epilogue(),
            (),
        )
        replace_by(fused, linear.node, rw)


def _float_weight(weight: Node) -> Miss:
    """Say that a weight is not quantized, or that an op which no dialect knows makes it."""
    op = overload_of(weight)
    if op is None or op.namespace in _KNOWN:
        return Miss(MissCode.NOT_QUANTIZED, weight, "the weight is not quantized")
    text = "the weight comes from {}, which no dialect translated"
    return Miss(MissCode.NOT_QUANTIZED, weight, text, op_name(weight))
