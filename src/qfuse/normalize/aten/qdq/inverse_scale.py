"""Write a quantization that multiplies by ``127 / amax`` as one that divides by ``amax / 127``."""

from __future__ import annotations

import torch

from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops.constants import is_constant_expression
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.rewrite.pattern import Either, Match, Num, PatternRule, V, guard, op
from qfuse.rewrite.prelude import Exactness, MissCode, Node, Rewriter, arguments, aten

PEAK, TOP = V("peak"), Num("top")
NOT_QUANTIZED = "it is not the factor of a quantization"


def is_rounded(node: Node) -> bool:
    """Whether ``node`` is rounded to integers, maybe after a clamp."""
    if len(node.users) != 1:
        return False
    (user,) = node.users
    if is_call(user, aten.clamp.default) and len(user.users) == 1:
        (user,) = user.users
    return is_call(user, aten.round.default)


def _is_factor_of(node: Node, factor: Node) -> bool:
    if not is_call(node, aten.mul.Tensor):
        return False
    a = arguments(node)
    x = a["other"] if a["self"] is factor else a["self"]
    return isinstance(x, Node) and x is not factor and shape_of(x) == shape_of(node)


@guard(MissCode.PATTERN, NOT_QUANTIZED)
def _quantizes(node: Node) -> bool:
    return any(_is_factor_of(user, node) and is_rounded(user) for user in node.users)


@guard(MissCode.ARGUMENT, "the largest quantized value is {top}")
def has_positive_top(top: float) -> bool:
    """Guard: the largest quantized value is positive."""
    return top > 0


@guard(
    MissCode.DTYPE,
    "its inverse is rounded to 16 bits, and quantizes other values than its scale: use float32",
)
def is_precise(node: Node) -> bool:
    """Guard: the inverse and the scale quantize the same values but for ties."""
    # In bfloat16 some values differ by two steps; in float16 the inverse may overflow.
    return dtype_of(node) in {torch.float32, torch.float64}


@guard(MissCode.PATTERN, "its value is known, and is inverted when it is quantized", at="peak")
def peak_is_computed(peak: Node) -> bool:
    """Guard: the largest magnitude is computed at run time."""
    return not is_constant_expression(peak)


class InverseScale(PatternRule):
    """``x * (127 / amax)``, rounded, becomes ``x / (amax / 127)``; so do its other users.

    Before::

        amax -> reciprocal -> mul(127) -> inverse
        x -> mul(inverse) -> round -> ...;  y -> div(inverse)

    After::

        amax -> div(127) -> scale
        x -> div(scale) -> round -> ...;  y -> mul(scale)

    Rounding: the scale is rounded once, and its inverse is not rounded before the product.

    Refuses: a factor that is known at compile time; one that is not rounded behind its product; one
    in float16 or bfloat16.
    """

    name = "inverse-scale"
    exactness = Exactness.ROUNDING
    pattern = (
        Either(
            op(aten.mul.Tensor, op(aten.reciprocal.default, PEAK), TOP),
            op(aten.div.Tensor, TOP, PEAK),
        )
        .given(has_positive_top, peak_is_computed, _quantizes, is_precise)
        .core()
    )

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Add the scale, and exchange products and quotients at all users that allow it."""
        inverse = site.node
        scale = shared_scale(rw, site)
        for user in list(inverse.users):
            _divide_apart(rw, user, inverse, scale)
            new = _exchanged(rw, user, inverse, scale)
            if new is not None:
                rw.replace(user, new)
        # `1 / inverse` is a reciprocal times 1.
        for user in list(scale.users):
            if is_call(user, aten.mul.Tensor) and 1 in arguments(user).values():
                rw.replace(user, scale)


def shared_scale(rw: Rewriter, site: Match) -> Node:
    """Add the scale, or make one node of it and of those that the source computes."""
    peak, top = site[PEAK], site[TOP]

    def is_scale(user: Node) -> bool:
        if not is_call(user, aten.div.Tensor):
            return False
        a = arguments(user)
        return a["self"] is peak and not isinstance(a["other"], Node) and bool(a["other"] == top)

    known = [user for user in peak.users if is_scale(user)]
    with rw.before(min((site.node, *known))):
        scale = rw.call(aten.div.Tensor, peak, top)
    for other in known:
        rw.replace(other, scale)
    return scale


def _divide_apart(rw: Rewriter, user: Node, inverse: Node, scale: Node) -> None:
    """Divide by the factors of ``user`` one by one, if it is the inverse times a constant."""
    if not is_call(user, aten.mul.Tensor):
        return
    a = arguments(user)
    other = a["other"] if a["self"] is inverse else a["self"]
    if isinstance(other, Node) and not is_constant_expression(other):
        return
    for quotient in list(user.users):
        if not is_call(quotient, aten.div.Tensor):
            continue
        b = arguments(quotient)
        if b["other"] is user and b["self"] is not user:
            with rw.before(quotient):
                y = rw.call(aten.mul.Tensor, b["self"], scale)
                rw.replace(quotient, rw.call(aten.div.Tensor, y, other))


def _exchanged(rw: Rewriter, user: Node, inverse: Node, scale: Node) -> Node | None:
    """Return what ``user`` computes from the scale; ``None`` for a user that keeps the inverse."""
    if is_call(user, aten.reciprocal.default):
        return scale
    if user.op != "call_function":
        return None  # the result of the graph
    a = arguments(user)
    with rw.before(user):
        if _is_factor_of(user, inverse):
            x = a["other"] if a["self"] is inverse else a["self"]
            return rw.call(aten.div.Tensor, x, scale)
        if is_call(user, aten.div.Tensor) and a["other"] is inverse and a["self"] is not inverse:
            return rw.call(aten.mul.Tensor, a["self"], scale)
    return None
