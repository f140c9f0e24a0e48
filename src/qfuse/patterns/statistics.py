"""The parts of a norm in plain ATen: means, variances, roots and centred values.

Each function returns a pattern. A root is the core: code without one is not a near miss of a norm.
"""

from __future__ import annotations

import math

import torch
from torch.fx.node import Argument

from qfuse.ir.dtypes import COMPUTE_DTYPES, widens
from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops.constants import number_of
from qfuse.ir.ops.norm_spec import Root, Statistic
from qfuse.ir.ops.views import dtype_of, node_of, shape_of
from qfuse.ir.quant.spec import dtype_name
from qfuse.patterns.casts import EXACT_CAST, exact_source
from qfuse.rewrite.pattern import (
    ANY,
    Arg,
    Capture,
    Either,
    Literal,
    Maybe,
    Pattern,
    V,
    bind,
    check,
    guard,
    let,
    op,
    through,
)
from qfuse.rewrite.prelude import Miss, MissCode, Node, arguments, aten

X = V("x", COMPUTE_DTYPES)
"""The value that is normalized, before casts that keep its values."""

SOURCE = Capture[Node]("source")
"""The operand of the mean of squares or the variance, in the dtype of the statistics."""

SPREAD = Capture[Node]("spread")
"""The mean of squares, or the variance."""

CENTRED, CENTRED_SOURCE = Capture[Node]("centred"), Capture[Node]("centred_source")
"""The differences from the mean: the ones that are scaled, and those squared for the variance."""

EPS, EPS_VALUE = Arg("eps"), Capture[float]("eps_value")
ROOT, STATISTIC = Capture[Root]("root"), Capture[Statistic]("statistic")


def reduced_axes(node: Node) -> int | None:
    """Return the number of axes that a mean or variance reduces, if they are the last ones."""
    a = arguments(node)
    dims, rank = a["dim"], len(shape_of(node_of(a["self"])))
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(dims, (list, tuple)) or not dims:
        return None
    named = {d % rank for d in dims if isinstance(d, int) and -rank <= d < rank}
    count = len(dims)
    return count if named == set(range(rank - count, rank)) else None


def _refuse_reduction(node: Node) -> Miss | None:
    """Refuse a mean or variance that does not reduce the last axes, or that drops them."""
    a = arguments(node)
    # A mean with a dtype casts its operand, which a spec has no field for.
    if a.get("dtype") not in {None, dtype_of(node_of(a["self"]))}:
        text = "the mean is computed in another dtype than its source"
        return Miss(MissCode.DTYPE, node, text)
    if a["keepdim"] is not True:
        text = "keepdim is False, so it broadcasts along other axes"
        return Miss(MissCode.ARGUMENT, node, text)
    if reduced_axes(node) is None:
        text = "it reduces the axes {}, which are not the last ones"
        return Miss(MissCode.AXIS, node, text, a["dim"])
    return None


@guard(MissCode.ARGUMENT, "the variance has a correction, and that of a layer norm does not")
def _is_biased(node: Node) -> bool:
    a = arguments(node)
    if is_call(node, aten.var.dim):
        # torch divides by n - 1 by default, a norm by n.
        return a["unbiased"] is False
    correction = a["correction"]
    return isinstance(correction, (int, float)) and correction == 0


@guard(MissCode.PATTERN, "the mean is of a product, not of squares")
def _is_square(node: Node) -> bool:
    left, right = (node_of(arguments(node)[name]) for name in ("self", "other"))
    # Two casts of one tensor are equal if neither rounds.
    return exact_source(left) is exact_source(right) and dtype_of(left) == dtype_of(right)


@guard(MissCode.DTYPE, "the mean is subtracted in another dtype")
def _keeps_type(node: Node) -> bool:
    # Otherwise torch promotes, and a mean that was rounded to bfloat16 is subtracted in float32.
    return dtype_of(node) == dtype_of(node_of(arguments(node)["other"]))


def mean(of: Pattern) -> Pattern:
    """Return the pattern of a mean over the last axes."""
    return op(aten.mean.dim, of, ANY, ANY, dtype=ANY).given(check(_refuse_reduction))


def variance(of: Pattern) -> Pattern:
    """Return the pattern of ``SPREAD``, the variance of ``of``."""
    of = of.named(SOURCE.label)
    var = Either(
        op(aten.var.dim, of, ANY, ANY, ANY),
        op(aten.var.correction, of, ANY, correction=ANY, keepdim=ANY),
    )
    kind = bind(STATISTIC, Statistic.VARIANCE)
    return var.named(SPREAD.label).given(_is_biased, check(_refuse_reduction), kind)


def mean_square(of: Pattern) -> Pattern:
    """Return the pattern of ``SPREAD``, the mean of the squares of ``of``."""
    of = of.named(SOURCE.label)
    square = Either(
        op(aten.square.default, of),
        op(aten.pow.Tensor_Scalar, of, 2),
        op(aten.mul.Tensor, of, V("", COMPUTE_DTYPES)).given(_is_square),
    )
    square = square.otherwise(MissCode.PATTERN, "the mean is of {found}, not of squares")
    return mean(square).named(SPREAD.label).given(bind(STATISTIC, Statistic.SQUARES))


def centred(difference: Capture[Node]) -> Pattern:
    """Return the pattern of ``X - mean(X)``, behind casts that keep its values."""
    minus = through(X, EXACT_CAST) - mean(through(X, EXACT_CAST))
    return through(minus.named(difference.label).given(_keeps_type), EXACT_CAST)


def inverse_root(spread: Pattern) -> Pattern:
    """Return the pattern of the factor of a tensor: one over the root."""
    spread = _with_eps(spread)
    root = _square_root(spread)
    below = Either(op(aten.reciprocal.default, root), op(aten.div.Tensor, 1, root))
    return Either(
        op(aten.rsqrt.default, spread).core().given(bind(ROOT, Root.RSQRT)),
        _power(spread, -0.5).given(bind(ROOT, Root.POWER)),
        # `1 / tensor` is traced as the product of a reciprocal and 1.
        Maybe(op(aten.mul.Tensor, below, 1), below).given(bind(ROOT, Root.RECIPROCAL)),
    )


def divisor(spread: Pattern) -> Pattern:
    """Return the pattern of the divisor of a tensor: the root."""
    return _square_root(_with_eps(spread)).given(bind(ROOT, Root.DIVIDE))


def _square_root(of: Pattern) -> Pattern:
    return Either(op(aten.sqrt.default, of).core(), _power(of, 0.5))


def _power(of: Pattern, exponent: float) -> Pattern:
    # The exponent is matched first: other powers are not roots, so not near misses.
    return op(aten.pow.Tensor_Scalar, exponent=Literal(exponent).core(), self=of)


def _with_eps(spread: Pattern) -> Pattern:
    text = "the root is of {found}, not of a sum with eps"
    total = op(aten.add.Tensor, spread, EPS).otherwise(MissCode.PATTERN, text)
    return total.given(let(EPS_VALUE, _eps))


def _eps(node: Node, spread: Node, eps: Argument) -> float | Miss:
    value = number_of(eps)
    if value is None:
        return Miss(MissCode.NOT_CONSTANT, node, "eps is not a constant")
    value, own = float(value), dtype_of(spread)
    if not 0 <= value < math.inf:
        return Miss(MissCode.ARGUMENT, node, "eps is {}", value)
    if dtype_of(node) != own or len(shape_of(node)) != len(shape_of(spread)):
        return Miss(MissCode.DTYPE, node, "eps changes the dtype or rank of the variance")
    # Kernels differ in whether they round a tensor to a narrow dtype before adding it.
    narrow = isinstance(eps, Node) and not widens(torch.float32, own)
    if narrow and torch.tensor(value, dtype=own).item() != value:
        text = "eps is a tensor, and not exact in {}"
        return Miss(MissCode.DTYPE, node, text, dtype_name(own))
    return value
