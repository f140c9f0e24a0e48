"""Fold a batch norm after a linear or convolution into the scale of its weight and its bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx.node import Argument

from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.views import result_of
from qfuse.optimize.fold.affine import AffineSite, affine_site, fold, foldable
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

# torch's batch norms normalize this axis.
_CHANNELS = 1


@dataclass(frozen=True, slots=True)
class BatchNormSite:
    """A batch norm as factors and summands, and its normalized result."""

    affine: AffineSite
    result: Node


class FoldBatchNorm(Rule[BatchNormSite]):
    """``batch_norm(convolution(x, dequantize(w, s), b))`` becomes a convolution.

    Before::

        w, s -> dequantize -> conv -> batch_norm

    After::

        w, s * f -> dequantize -> conv

    The factor ``f`` is ``gamma / sqrt(var + eps)``; ``(b - mean) * f + beta`` is the new bias.

    Rounding: scale and bias are rounded instead of the steps of the norm.

    Refuses: a norm in training, or with statistics or parameters that are computed at run time; one
    whose statistics are results; one along another axis than the output channels; what
    :class:`~qfuse.optimize.fold.scale.FoldScale` refuses of weights, users and scales.
    """

    name = "fold-batch-norm"
    anchors: ClassVar[tuple[OpOverload, ...]] = (
        aten.batch_norm.default,
        aten._native_batch_norm_legit_no_training.default,
    )
    exactness = Exactness.ROUNDING

    def match(self, node: Node) -> BatchNormSite | Miss:
        """Match a norm of a foldable op with constant statistics."""
        a = arguments(node)
        into = foldable(a["input"], node)
        if isinstance(into, Miss):
            return into
        if a.get("training", False) is not False:
            return Miss(MissCode.ARGUMENT, node, "it computes statistics of its input", progress=2)
        # Of a linear over [batch, tokens, features], a batch norm normalizes the tokens.
        if into.axis != _CHANNELS:
            text = "it normalizes along axis 1, and the output channels are axis {}"
            return Miss(MissCode.AXIS, node, text, into.axis, progress=2)
        result = _normalized(node)
        if isinstance(result, Miss):
            return result
        parts = _factor_and_shift(into.n, node, a)
        if isinstance(parts, Miss):
            return parts
        affine = affine_site(into, node, result, factor=parts[0], shift=parts[1])
        return affine if isinstance(affine, Miss) else BatchNormSite(affine, result)

    def rewrite(self, site: BatchNormSite, rw: Rewriter) -> None:
        """Replace the norm by the op with another scale and bias."""
        rw.replace(site.result, fold(site.affine, rw))


def _normalized(node: Node) -> Node | Miss:
    """Return the normalized result, if it is the only one that is used."""
    if is_call(node, aten.batch_norm.default):
        return node
    users = list(node.users)
    parts = [result_of(user) for user in users]
    if len(parts) != 1 or parts[0] is None or parts[0][1] != 0:
        return Miss(MissCode.SHARED, node, "its statistics are used too", progress=2)
    return users[0]


def _factor_and_shift(
    n: int, node: Node, a: dict[str, Argument]
) -> tuple[torch.Tensor, torch.Tensor] | Miss:
    """Return what the norm multiplies by, and what it adds then; float64, ``[n]``."""
    ones, eps = torch.ones(n, dtype=torch.float64), a["eps"]
    gamma = ones if a["weight"] is None else constant_value(a["weight"])
    beta = torch.zeros_like(ones) if a["bias"] is None else constant_value(a["bias"])
    mean, var = (constant_value(a[name]) for name in ("running_mean", "running_var"))
    if gamma is None or beta is None or mean is None or var is None:
        text = "its statistics or parameters are computed at run time"
        return Miss(MissCode.NOT_CONSTANT, node, text, progress=2)
    assert isinstance(eps, (int, float)), "eps is a number in the schema"
    # In float64, as the factor is rounded only once it is part of the scale.
    factor = gamma.double() / (var.double() + eps).sqrt()
    shift = beta.double() - mean.double() * factor
    # A variance of 0 with eps 0.
    if not bool((factor + shift).isfinite().all()):
        return Miss(MissCode.RANGE, node, "its factors are not finite", progress=2)
    return factor, shift
