"""A constant that is added to each output feature of a linear is its bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx.node import Argument

from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.linear import Linear, as_linear
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.normalize.aten.linear.weights import call_linear
from qfuse.normalize.importers.rule import RefusedError
from qfuse.normalize.match.broadcast import is_per_feature
from qfuse.normalize.match.constants import derived
from qfuse.normalize.match.views import Path, strip_views
from qfuse.rewrite.prelude import (
    Exactness,
    Miss,
    MissCode,
    Node,
    OpOverload,
    Rewriter,
    Rule,
    arguments,
    aten,
)


@dataclass(frozen=True, slots=True)
class BiasSite:
    """A linear without a bias, the sum that alone reads it, and the bias.

    Attributes:
        node: The sum.
        linear: The linear.
        path: The views between.
        home: Where the bias comes from.
        bias: Its value, of shape ``[N]`` and the linear's type.
    """

    node: Node
    linear: Linear
    path: Path
    home: Node
    bias: torch.Tensor


class FuseBias(Rule[BiasSite]):
    """``linear(x, w) + b`` becomes ``linear(x, w, b)``.

    Before::

        x, w -> linear -> view -> add(b)

    After::

        x, w, b -> linear -> view

    Rounding: the sum may be taken before the product is rounded to the type of the result.

    Refuses: ``alpha`` other than 1; a summand that is not a constant, or not one number per output
    feature; a linear that has a bias, or that others read; a sum of another type than the linear,
    since the linear would be rounded after the sum instead of before.
    """

    name = "fuse-bias"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.add.Tensor,)
    exactness = Exactness.ROUNDING

    def match(self, node: Node) -> BiasSite | Miss:
        """Match a sum of a linear and a constant, in either order."""
        a = arguments(node)
        for value, bias in ((a["self"], a["other"]), (a["other"], a["self"])):
            path = strip_views(value, casts=False)
            linear = None if path is None else as_linear(path.base)
            if path is None or linear is None or not isinstance(value, Node):
                continue
            refusal = _no_bias(node, value, bias)
            if refusal is not None:
                return refusal
            assert isinstance(bias, Node), "a bias is a node"
            try:
                return _read(node, path, linear, bias)
            except RefusedError as refused:
                return refused.miss
        return Miss(MissCode.PATTERN, node, "no summand is a linear", progress=0)

    def rewrite(self, site: BiasSite, rw: Rewriter) -> None:
        """Add the bias to the linear."""
        bias = derived(rw, site.home, site.bias, "bias")
        new = call_linear(rw, site.linear.x, site.linear.weight, bias, like=site.linear.node)
        rw.replace(site.node, site.path.restore(rw, new, dtype_of(site.node)))


def _no_bias(node: Node, value: Node, bias: Argument) -> Miss | None:
    """Refuse a summand that is no bias but a residual or a constant: nobody expects it fused."""
    if not isinstance(bias, Node) or not isinstance(bias.meta["val"], torch.Tensor):
        return Miss(MissCode.ARGUMENT, node, "the summand is a number", progress=0)
    if not is_per_feature(shape_of(bias), shape_of(value)):
        text = "a summand of shape {} is not one number per output feature"
        return Miss(MissCode.SHAPE, bias, text, tuple(shape_of(bias)), progress=0)
    return None


def _read(node: Node, path: Path, linear: Linear, bias: Node) -> BiasSite:
    alpha = arguments(node)["alpha"]
    if alpha != 1:
        raise RefusedError(MissCode.ARGUMENT, node, "alpha={} scales a part of the sum", alpha)
    known = constant_value(bias)
    if known is None:
        raise RefusedError(MissCode.NOT_CONSTANT, bias, "the summand is computed at run time")
    if linear.bias is not None:
        raise RefusedError(MissCode.ARGUMENT, linear.node, "the linear has a bias already")
    real = dtype_of(linear.node)
    if dtype_of(node) != real:
        raise RefusedError(
            MissCode.DTYPE, node, "the sum is {}, the linear {}", dtype_of(node), real
        )
    if path.shared is not None:
        raise RefusedError(MissCode.SHARED, path.shared, "others read the linear too")
    return BiasSite(node, linear, path, bias, known.reshape(-1).to(real))
