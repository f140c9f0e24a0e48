"""A zero point of the activation that is corrected after an integer product."""

from __future__ import annotations

import torch
from torch.fx.node import Argument

from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops.constants import number_of
from qfuse.ir.ops.value_range import bounds_of
from qfuse.ir.ops.views import dtype_of, node_of, shape_of, tensor_of
from qfuse.normalize.aten.int_matmul.activation import refuse_outside
from qfuse.normalize.aten.int_matmul.products import (
    WIDENING,
    IntProduct,
    as_int_product,
    is_column_sum,
    multiple_of_sums,
)
from qfuse.normalize.match.broadcast import Broadcast, broadcast_of, is_per_feature
from qfuse.rewrite.pattern import (
    Arg,
    Const,
    Either,
    Known,
    Match,
    PatternRule,
    Read,
    V,
    cast,
    check,
    guard,
    let,
    match,
    op,
    through,
)
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, Rewriter, arguments, aten

_UNSIGNED_SHIFT = 128
_INT32 = torch.iinfo(torch.int32).max

PRODUCT = Read("product", as_int_product, "product of integers")
ZERO, SUMS = Arg("zero"), V("sums")
Y = V("y", torch.int8)
_WIDE_Y = through(Y, WIDENING).giving(torch.int16, torch.int32, torch.int64)
# The shift for machines that multiply unsigned by signed integers.
_UNSIGNED = cast(op(aten.add.Tensor, _WIDE_Y, Arg("shift")), torch.uint8)


@guard(MissCode.PATTERN, "it is corrected once already")
def _is_uncorrected(product: IntProduct) -> bool:
    return product.zero is None


@guard(MissCode.PATTERN, "it is not corrected by the sums of its own weight over K", "correction")
def _are_sums(product: IntProduct, sums: Node) -> bool:
    return is_column_sum(sums, product.weight, rows=product.rows)


@guard(MissCode.SHARED, "the product has other users", at="product")
def _is_single_use(product: IntProduct) -> bool:
    # Another user needs the uncorrected product, which would be a second matrix product.
    return len(product.node.users) == 1


@guard(MissCode.AXIS, "sums of shape {sums.shape} are not one number per output feature", at="sums")
def _are_per_feature(product: IntProduct, sums: Node) -> bool:
    return is_per_feature(shape_of(sums), shape_of(product.node))


def _zero_refusal(product: IntProduct, zero: Argument, node: Node) -> Miss | None:
    if isinstance(zero, Node):
        spread = broadcast_of(shape_of(zero), shape_of(product.node))
        if spread not in {Broadcast.ROWS, Broadcast.TENSOR}:
            text = "a zero point of shape {} is not one number per row"
            return Miss(MissCode.AXIS, zero, text, tuple(shape_of(zero)))
        if not dtype_of(zero).is_floating_point and dtype_of(zero) is not torch.bool:
            return None
    elif isinstance(zero, int) and not isinstance(zero, bool):
        return None
    at = zero if isinstance(zero, Node) else node
    return Miss(MissCode.DTYPE, at, "the zero point is not an integer")


@guard(MissCode.DTYPE, "the difference is taken in {node.dtype}, which may not wrap as 32 bits do")
def _fits_32_bits(node: Node, product: IntProduct, zero: Argument) -> bool:
    # 32-bit arithmetic is modulo 2^32, so both orders wrap to the same integer; 64-bit sums that
    # are computed in 32 bits do not.
    if dtype_of(node) == dtype_of(product.node) == torch.int32:
        return True
    number = number_of(zero)
    bounds = (number, number) if number is not None else None
    if bounds is None and isinstance(zero, Node):
        bounds = bounds_of(zero)
    small = bounds is not None and -255 <= bounds[0] <= bounds[1] <= 255  # noqa: PLR2004
    # |x - zero| <= 510.
    weight = 128 if dtype_of(product.weight) is torch.int8 else 255
    most = _INT32 // (510 * weight)
    return small and all(size <= most for size in shape_of(product.weight))


def _known_zero(node: Node, product: IntProduct, sums: Known) -> Argument | Miss:
    """Return the zero point of a correction that was multiplied ahead of time."""
    factor = multiple_of_sums(sums.value, product.weight, rows=product.rows)
    if factor is None:
        text = "the constant is not a multiple of the sums of the weight over K"
        return Miss(MissCode.PATTERN, sums.node, text)
    return -factor if is_call(node, aten.add.Tensor) else factor


@guard(MissCode.AXIS, "the constant is not one number per output feature", at="product")
def _is_vector(product: IntProduct, sums: Known) -> bool:
    return is_per_feature(shape_of(sums.node), shape_of(product.node))


_GUARDS = (_is_single_use, check(_zero_refusal), _fits_32_bits)
_MULTIPLIED = op(
    aten.sub.Tensor,
    PRODUCT.given(_is_uncorrected),
    op(aten.mul.Tensor, ZERO, SUMS.given(_are_sums)).named("correction").core(),
    alpha=1,
).given(_is_single_use, _are_per_feature, check(_zero_refusal), _fits_32_bits)
_CONSTANT = tuple(
    op(target, PRODUCT.given(_is_uncorrected), Const("sums"), alpha=1).given(
        _is_vector, let(ZERO, _known_zero), *_GUARDS
    )
    for target in (aten.sub.Tensor, aten.add.Tensor)
)
SHIFTED = Either(_MULTIPLIED, *_CONSTANT)
"""``product - ZERO * SUMS`` in integers, whose second term may be a constant."""


def shifted(found: Match) -> tuple[Node, Argument]:
    """Return the activation and the zero point that :data:`SHIFTED` subtracts from it.

    ``uint8(y + 128)`` with the zero point 128 is ``y`` without one.
    """
    x, zero = found[PRODUCT].x, found[ZERO]
    # The shift of 128 and the zero point of 128 cancel only as a pair; any other shift wraps in
    # uint8.
    unsigned = match(_UNSIGNED, x) if number_of(zero) == _UNSIGNED_SHIFT else None
    if isinstance(unsigned, Match) and number_of(unsigned.bound["shift"]) == _UNSIGNED_SHIFT:
        return unsigned[Y], None
    return x, zero


def _refuse_outside(match: Match, node: Node) -> Miss | None:
    return refuse_outside(node, *shifted(match))


class IntMmShift(PatternRule):
    """``mm(x, w) - zero_point * sum(w)`` in integers becomes ``mm(x - zero_point, w)``.

    Before::

        x -> mm(w) --------------------------+
        w -> sum over K -> mul(zero_point) --+-> sub

    After::

        x -> sub(zero_point) -> mm(w)

    The second term may be a constant that was multiplied ahead of time, also one that is added.
    If the zero point is 128 and ``x`` is ``uint8(y + 128)`` of an int8 ``y``, the spelling for
    machines that multiply unsigned by signed integers, the result is ``mm(y, w)``.

    Exact: the same integers, also where they wrap.

    Refuses: a zero point that is neither per row nor a scalar; sums of another weight or over
    another axis; a 64-bit result that could differ from 32 bits; a product with other
    users; a zero point that may lie outside of the range of ``x``, with which no kernel multiplies.
    """

    name = "int-mm-shift"
    exactness = Exactness.EXACT
    pattern = SHIFTED.given(check(_refuse_outside))

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Subtract before the product instead of after it."""
        product = site[PRODUCT].node
        x, zero = shifted(site)
        left = _int32(rw, x)
        if zero is not None:
            number = _int32(rw, zero) if isinstance(zero, Node) else zero
            left = rw.call(aten.sub.Tensor, left, number)
        a = arguments(product)
        right = _int32(rw, node_of(a["other"] if "other" in a else a["mat2"]))
        is_matrix = len(shape_of(left)) == 2  # noqa: PLR2004
        op_ = aten.mm.default if is_matrix else aten.matmul.default
        if dtype_of(product) == torch.int32:
            y = rw.replay(op_, (left, right), {}, tensor_of(product))
        else:
            y = rw.call(op_, left, right)
        if dtype_of(y) != dtype_of(site.node):
            y = rw.call(aten._to_copy.default, y, dtype=dtype_of(site.node))
        rw.replace(site.node, y)


def _int32(rw: Rewriter, node: Node) -> Node:
    if dtype_of(node) == torch.int32:
        return node
    return rw.call(aten._to_copy.default, node, dtype=torch.int32)
