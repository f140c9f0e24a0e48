"""Fold a batch norm after a linear or convolution into the scale of its weight and its bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qfuse.ir.memory_formats import CHANNELS
from qfuse.ir.ops.batch_norm import BATCH_NORMS
from qfuse.optimize.fold.affine import AffineSite, affine_site, fold, foldable
from qfuse.optimize.match.batch_norm import factor_and_shift, normalized, refuse_training
from qfuse.rewrite.prelude import (
    Exactness,
    Miss,
    MissCode,
    Node,
    OpOverload,
    Rewriter,
    Rule,
    arguments,
)


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
    anchors: ClassVar[tuple[OpOverload, ...]] = BATCH_NORMS
    exactness = Exactness.ROUNDING

    def match(self, node: Node) -> BatchNormSite | Miss:
        """Match a norm of a foldable op with constant statistics."""
        a = arguments(node)
        into = foldable(a["input"], node)
        if isinstance(into, Miss):
            return into
        training = refuse_training(node)
        if training is not None:
            return training
        # Of a linear over [batch, tokens, features], a batch norm normalizes the tokens.
        if into.axis != CHANNELS:
            text = "it normalizes along axis 1, and the output channels are axis {}"
            return Miss(MissCode.AXIS, node, text, into.axis, progress=2)
        result = normalized(node)
        if isinstance(result, Miss):
            return result
        parts = factor_and_shift(into.n, node)
        if isinstance(parts, Miss):
            return parts
        affine = affine_site(into, node, result, factor=parts[0], shift=parts[1])
        return affine if isinstance(affine, Miss) else BatchNormSite(affine, result)

    def rewrite(self, site: BatchNormSite, rw: Rewriter) -> None:
        """Replace the norm by the op with another scale and bias."""
        rw.replace(site.result, fold(site.affine, rw))
