"""Fold the factors of ``addmm`` and its kin into the scale of a quantized weight and the bias."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.qdq import Dequantize, as_dequantize
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.quant.spec import ZeroPointDomain
from qfuse.normalize.aten.linear.spellings import BY_ROWS, ROWS, SHARED, WEIGHT, X
from qfuse.normalize.aten.linear.weights import call_linear, transposed
from qfuse.normalize.aten.qdq.scale_factor import check_range
from qfuse.normalize.match.broadcast import is_per_feature
from qfuse.normalize.match.constants import derived
from qfuse.normalize.match.quantized_values import quantized_values
from qfuse.normalize.match.views import transpose_source
from qfuse.rewrite.pattern import Either, Match, Num, PatternRule, V, check, guard, op
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, Rewriter, aten

SUMMAND, ALPHA, BETA = V("summand"), Num("alpha"), Num("beta")


@guard(MissCode.NOT_QUANTIZED, "the weight is not quantized", at="weight")
def _is_quantized(weight: Node) -> bool:
    matrix = _matrix(weight)
    return as_dequantize(matrix) is not None or quantized_values(matrix) is not None


def _matrix(weight: Node) -> Node:
    """Return what a weight is the transpose of, if it is one."""
    node = weight
    while (source := transpose_source(node)) is not None:
        node = source
    return node


@guard(MissCode.ARGUMENT, "alpha is {alpha}, beta is {beta}")
def _has_factors(alpha: float, beta: float) -> bool:
    # With `alpha` 0 torch does not look at the product, whose values may be NaN.
    return math.isfinite(alpha) and alpha != 0 and math.isfinite(beta)


@guard(MissCode.PATTERN, "alpha and beta are 1, and the summand is a bias")
def _is_scaled(node: Node, summand: Node, alpha: float, beta: float) -> bool:
    # A summand that is no bias, such as a residual, is added behind the linear.
    bias = is_per_feature(shape_of(summand), shape_of(node))
    return (alpha, beta) != (1, 1) or not bias or is_call(node, aten.addmv.default)


def _takes_factor(weight: Dequantize) -> bool:
    """Whether the scale of a weight is a known float, and may be multiplied."""
    params = weight.params
    offset = params.spec.domain is ZeroPointDomain.FLOAT_OFFSET
    return params.spec.is_plain and not offset and constant_value(params.scale) is not None


def _scaled(weight: Dequantize, alpha: float) -> torch.Tensor:
    """Return the scale times ``alpha``, in float32 at least."""
    scale = constant_value(weight.params.scale)
    assert scale is not None, "it is a constant"
    return (scale.double() * alpha).to(torch.promote_types(scale.dtype, torch.float32))


def _refuse_range(weight: Node, alpha: float) -> Miss | None:
    known = as_dequantize(_matrix(weight))
    if known is None or not _takes_factor(known):
        return None
    params = known.params
    shifted = params.zero_point is not None
    return check_range(weight, _scaled(known, alpha), params.spec, shifted=shifted)


class FoldAddmmFactors(PatternRule):
    """``addmm(y, x, w, beta, alpha)`` becomes ``linear(x, alpha * w, beta * y)``.

    Before::

        y, x, q -> dequantize(s) -> addmm(beta, alpha)

    After::

        y * beta, x, q -> dequantize(s * alpha) -> linear

    The same for ``baddbmm`` and ``addmv``, and without factors if ``y`` is not a bias. ``beta`` is
    folded into a constant with one number per output feature; any other summand is added behind the
    linear. A weight that has no scale yet is multiplied behind the linear, and takes that factor as
    its scale.

    Rounding: scale and bias are rounded after the products with the factors.

    Refuses: weights that are not quantized; ``alpha`` 0, which torch does not multiply by; infinite
    and NaN factors; scales out of the normal range.
    """

    name = "fold-addmm-factors"
    exactness = Exactness.ROUNDING
    pattern = Either(
        op(aten.addmm.default, mat2=WEIGHT, mat1=X, self=SUMMAND, alpha=ALPHA, beta=BETA),
        op(aten.baddbmm.default, batch2=SHARED, batch1=X, self=SUMMAND, alpha=ALPHA, beta=BETA),
        op(aten.addmv.default, mat=ROWS, vec=X, self=SUMMAND, alpha=ALPHA, beta=BETA),
    ).given(_is_quantized, _is_scaled, _has_factors, check(_refuse_range))

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Scale the weight and the bias."""
        alpha, beta = site[ALPHA], site[BETA]
        weight = site[WEIGHT] if site.get(BY_ROWS) else transposed(rw, site[WEIGHT])
        known = as_dequantize(weight)
        folds = known is not None and _takes_factor(known)
        if known is not None and folds and alpha != 1:
            scale = derived(rw, known.params.scale, _scaled(known, alpha), "alpha")
            weight = rw.call(ops.dequantize, *replace(known.params, scale=scale).call_args(known.q))
        bias = _bias(rw, site) if beta != 0 else None
        y = call_linear(rw, site[X], weight, bias if folds else None)
        if not folds and alpha != 1:
            y = rw.call(aten.mul.Tensor, y, alpha)
        if bias is not None and not folds:
            y = rw.call(aten.add.Tensor, y, bias)
        elif bias is None and beta != 0:
            y = rw.call(aten.add.Tensor, y, site[SUMMAND], alpha=beta)
        rw.replace(site.node, y)


def _bias(rw: Rewriter, site: Match) -> Node | None:
    """Return ``beta`` times a constant of one number per output feature."""
    summand = site[SUMMAND]
    value = constant_value(summand)
    if value is None or not is_per_feature(shape_of(summand), shape_of(site.node)):
        return None
    scaled = (value.double() * site[BETA]).to(dtype_of(summand)).reshape(-1)
    return derived(rw, summand, scaled, "beta")
