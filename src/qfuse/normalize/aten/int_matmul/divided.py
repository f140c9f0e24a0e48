"""Write a quotient by a scale as a product with its inverse."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass

import torch
from torch.fx.node import Argument

from qfuse.ir.dtypes import COMPUTE_DTYPES
from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops.constants import constant_value, is_constant_expression
from qfuse.ir.ops.qdq import as_quantize
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.normalize.aten.int_matmul.scaled import STEPS, ScaledProduct
from qfuse.normalize.aten.int_matmul.scaled_product import unscaled
from qfuse.normalize.match.broadcast import Broadcast, block_of, broadcast_of
from qfuse.normalize.match.constants import derived
from qfuse.normalize.match.lookup import lookup_of
from qfuse.normalize.match.quantized_values import QUANTIZED
from qfuse.normalize.match.views import reapply_views, rows_source, view_source
from qfuse.rewrite.pattern import Capture, Either, Match, Operand, Path, PatternRule, Read, through
from qfuse.rewrite.pattern.guards import guard, let, single_use
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, Rewriter, aten


@dataclass(frozen=True, slots=True)
class Inverse:
    """The inverse of a divisor.

    Attributes:
        by: The divisor.
        value: The inverse; ``None`` if it is computed at run time.
        exact: Whether a product with it has the bits of the quotient.
    """

    by: Argument
    value: torch.Tensor | None
    exact: bool = False

    def times(self, rw: Rewriter, x: Node, dtype: torch.dtype) -> Node:
        """Return the product with ``x`` in ``dtype``."""
        factor: Argument
        if not isinstance(self.by, Node):
            assert self.value is not None, "a number is known"
            factor = self.value.item()
        elif self.value is None:
            factor = _reciprocal(rw, self.by, _wide(dtype))
        else:
            factor = derived(rw, self.by, self.value, "inverse")
        y = rw.call(aten.mul.Tensor, x, factor)
        return y if dtype_of(y) == dtype else rw.call(aten._to_copy.default, y, dtype=dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which torch divides, before it rounds to ``dtype``."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _reciprocal(rw: Rewriter, by: Node, compute: torch.dtype) -> Node:
    # Below the views, so that the scale is found in the shape in which it was computed.
    source = rows_source(by)
    if source is not None:
        return reapply_views(rw, by, _reciprocal(rw, source, compute))
    if dtype_of(by) != compute:
        by = rw.call(aten._to_copy.default, by, dtype=compute)
    return rw.call(aten.reciprocal.default, by)


def _inverse(node: Node, by: Argument) -> Inverse | Miss:
    """Return the inverse of the divisor of ``node``."""
    compute = _wide(dtype_of(node))
    if isinstance(by, (int, float)):
        known = torch.tensor(float(by), dtype=compute)
    else:
        held = constant_value(by)
        if held is None:
            return Inverse(by, None)
        if held.dtype is torch.bool or held.is_complex():
            return Miss(MissCode.DTYPE, node, "the divisor is {}", held.dtype)
        known = held
    value = known.to(compute).reciprocal()
    # The inverse of a subnormal number overflows, and that of a huge one loses bits.
    normal = value.isfinite() & (value.abs() >= torch.finfo(compute).tiny)
    if not bool(normal.all()):
        text = "the divisor is 0, is not finite, or has no inverse among the normal numbers"
        return Miss(MissCode.RANGE, node, text)
    exact = bool((torch.frexp(value).mantissa.abs() == 0.5).all())  # noqa: PLR2004
    # A power of two may stay in a half dtype, so that the product has the dtype of the quotient.
    same = known.dtype.is_floating_point and torch.equal(value.to(known.dtype).to(compute), value)
    return Inverse(by, value.to(known.dtype) if exact and same else value, exact)


PATH, INVERSE = Capture[Path]("path"), Capture[Inverse]("inverse")
DIVIDEND, BY = Capture[Node]("dividend"), Operand("by")
_ONE_USER = single_use("path", text="the undivided result has other users")


@guard(MissCode.PATTERN, "it is quantized after the division, by the divisor")
def _is_not_quantized(node: Node) -> bool:
    return not _feeds_round(node)


def _feeds_round(node: Node, steps: int = 2) -> bool:
    """Whether ``node`` is rounded, maybe after the sum with a zero point and a clamp."""
    between = (aten.add.Tensor, aten.clamp.default)
    return any(
        is_call(user, aten.round.default)
        or (steps > 0 and is_call(user, *between) and _feeds_round(user, steps - 1))
        for user in node.users
    )


def _of_product(node: Node, product: ScaledProduct, dividend: Node, by: Argument) -> Inverse | Miss:
    """Return the inverse of a divisor that is a scale of one operand of the product."""
    found = _inverse(node, by)
    if isinstance(found, Miss):
        return found
    spread = Broadcast.TENSOR
    if isinstance(by, Node):
        given = broadcast_of(shape_of(by), shape_of(dividend))
        if given is None:
            text = "a divisor of shape {} for a result of shape {} is not a scale of either operand"
            sizes = tuple(shape_of(by)), tuple(shape_of(dividend))
            return Miss(MissCode.AXIS, by, text, *sizes)
        spread = given
    for_x = product.takes_row_scale and product.bias is None and spread is not Broadcast.CHANNEL
    for_weight = product.weight.is_open and spread is not Broadcast.ROWS and found.value is not None
    if for_weight and product.bias is not None and constant_value(product.bias) is None:
        text = "the bias is divided too, and is computed at run time"
        return Miss(MissCode.NOT_CONSTANT, product.bias, text)
    if for_x or for_weight:
        return found
    text = "the divisor is neither a constant scale of the weight nor a scale of the activation"
    return Miss(MissCode.NOT_CONSTANT, by if isinstance(by, Node) else node, text)


@guard(MissCode.NOT_CONSTANT, "the dividend is neither a weight nor the result of a quantize", "q")
def _is_stored(q: Node) -> bool:
    # `image / 255` has the same form, and nothing quantized it.
    root = q
    while (source := view_source(root)) is not None:
        root = source
    return is_constant_expression(q) or as_quantize(root) is not None or lookup_of(q) is not None


def _of_values(node: Node, dividend: Node, by: Argument) -> Inverse | Miss:
    """Return the inverse of a divisor that is a scale of quantized values."""
    found = _inverse(node, by)
    if isinstance(found, Miss):
        return found
    if found.value is None:
        return Miss(MissCode.NOT_CONSTANT, node, "the divisor is computed at run time")
    if not bool((found.value > 0).all()):
        return Miss(MissCode.RANGE, node, "the divisor is negative, so not a scale")
    if isinstance(by, Node) and block_of(shape_of(dividend), shape_of(by)) is None:
        text = "a divisor of shape {} does not tile quantized values of shape {}"
        sizes = tuple(shape_of(by)), tuple(shape_of(dividend))
        return Miss(MissCode.SHAPE, by, text, *sizes)
    return found


@guard(MissCode.ARITHMETIC, "the divisor is not a power of two")
def _is_exact(inverse: Inverse) -> bool:
    return inverse.exact


_PRODUCT = through(Read("product", unscaled, "product").core(), *STEPS, path=PATH)
_QUOTIENT = Either(
    (_PRODUCT.named(DIVIDEND.label) / BY)
    .giving(*COMPUTE_DTYPES)
    .given(_ONE_USER, _is_not_quantized, let(INVERSE, _of_product)),
    (QUANTIZED.given(_is_stored).core().named(DIVIDEND.label) / BY)
    .giving(*COMPUTE_DTYPES)
    .given(_is_not_quantized, let(INVERSE, _of_values)),
)


class DividedBy(PatternRule, ABC):
    """``linear(x, w) / s`` and ``w / s`` become products with ``1 / s``.

    Before::

        x, w int8 -> cast, linear -> div(s)

    After::

        x, w int8 -> cast, linear -> mul(1 / s)

    The dividend is a product that has no scale yet, or quantized values; the rules for products
    read the rest. The inverse of a constant is taken at compile time, in float32 for dividends of
    half dtypes; that of one number per row of a product of integers at run time.

    Exact if every divisor is a power of two, otherwise rounding: the inverse is rounded too.

    Refuses: a quotient that is quantized by its divisor; a divisor that is not a scale of either
    operand; one that is computed at run time for a weight; zero, infinite and NaN divisors, and
    those without a normal inverse; a product with other users; values that nothing quantized.
    """

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Multiply by the inverse."""
        y = site[INVERSE].times(rw, site[DIVIDEND], dtype_of(site.node))
        rw.replace(site.node, y)


DividedExactly = DividedBy.row("divided-exactly", Exactness.EXACT, _QUOTIENT.given(_is_exact))
"""The rule for powers of two."""

Divided = DividedBy.row("divided", Exactness.ROUNDING, _QUOTIENT)
"""The rule for all other divisors."""
