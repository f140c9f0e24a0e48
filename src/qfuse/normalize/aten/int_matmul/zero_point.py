"""A zero point of the activation that is corrected after an integer product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx.node import Argument

from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops.constants import number_of
from qfuse.ir.ops.value_range import bounds_of
from qfuse.ir.ops.views import dtype_of, node_of, shape_of, tensor_of
from qfuse.normalize.aten.int_matmul.match import (
    IntProduct,
    as_int_product,
    column_sum,
    integers_behind,
)
from qfuse.normalize.importers.rule import RefusedError
from qfuse.normalize.match.broadcast import Spread, is_per_feature, spread_of
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

_UNSIGNED_SHIFT = 128
_EXACT_TERMS = 1 << 15


@dataclass(frozen=True, slots=True)
class IntMmShiftSite:
    """A product of integers minus a zero point times the sums of the weight.

    Attributes:
        node: The difference.
        product: The product.
        x: The activation that the result is about.
        zero: What is subtracted from it: a node, a number, or ``None``.
    """

    node: Node
    product: IntProduct
    x: Node
    zero: Argument


class IntMmShift(Rule[IntMmShiftSite]):
    """``mm(x, w) - zero_point * sum(w)`` in integers becomes ``mm(x - zero_point, w)``.

    Before::

        x -> mm(w) --------------------------+
        w -> sum over K -> mul(zero_point) --+-> sub

    After::

        x -> sub(zero_point) -> mm(w)

    If the zero point is 128 and ``x`` is ``uint8(y + 128)`` of an int8 ``y``, as it is spelled for
    machines that multiply unsigned by signed numbers, the result is ``mm(y, w)``.

    Exact: the same integers, also where they wrap.

    Refuses: a zero point that is neither per row nor for all; sums of another weight or over
    another axis; a 64-bit result that could differ from 32 bits; a product that others read.
    """

    name = "int-mm-shift"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.sub.Tensor,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> IntMmShiftSite | Miss:
        """Match the difference of a product and a correction."""
        a = arguments(node)
        product = as_int_product(a["self"])
        correction = a["other"]
        if (
            product is None
            or product.zero is not None
            or a["alpha"] != 1
            or not is_call(correction, aten.mul.Tensor)
        ):
            text = "it is not the difference of a product of integers and a product"
            return Miss(MissCode.PATTERN, node, text, progress=0)
        try:
            return _read(node, product, node_of(correction))
        except RefusedError as refused:
            return refused.miss

    def rewrite(self, site: IntMmShiftSite, rw: Rewriter) -> None:
        """Subtract before the product instead of after it."""
        left = rw.call(aten._to_copy.default, site.x, dtype=torch.int32)
        if isinstance(site.zero, Node) and dtype_of(site.zero) != torch.int32:
            zero = rw.call(aten._to_copy.default, site.zero, dtype=torch.int32)
            left = rw.call(aten.sub.Tensor, left, zero)
        elif site.zero is not None:
            left = rw.call(aten.sub.Tensor, left, site.zero)
        product = arguments(site.product.node)
        right = node_of(product["other"] if "other" in product else product["mat2"])
        if dtype_of(right) != torch.int32:
            right = rw.call(aten._to_copy.default, right, dtype=torch.int32)
        is_matrix = len(shape_of(left)) == 2  # noqa: PLR2004
        op = aten.mm.default if is_matrix else aten.matmul.default
        if dtype_of(site.product.node) == torch.int32:
            y = rw.replay(op, (left, right), {}, tensor_of(site.product.node))
        else:
            y = rw.call(op, left, right)
        if dtype_of(y) != dtype_of(site.node):
            y = rw.call(aten._to_copy.default, y, dtype=dtype_of(site.node))
        rw.replace(site.node, y)


def _read(node: Node, product: IntProduct, correction: Node) -> IntMmShiftSite:
    zero, sums = _read_correction(correction, product)
    if len(product.node.users) > 1:
        raise RefusedError(MissCode.SHARED, product.node, "others read the product too")
    shape = shape_of(product.node)
    if not is_per_feature(shape_of(sums), shape):
        text = "sums of shape {} are not one number per output feature"
        raise RefusedError(MissCode.AXIS, sums, text, tuple(shape_of(sums)))
    if isinstance(zero, Node):
        if spread_of(shape_of(zero), shape) not in {Spread.ROWS, Spread.TENSOR}:
            text = "a zero point of shape {} is not one number per row"
            raise RefusedError(MissCode.AXIS, zero, text, tuple(shape_of(zero)))
        if dtype_of(zero).is_floating_point or dtype_of(zero) is torch.bool:
            raise RefusedError(MissCode.DTYPE, zero, "the zero point is no integer")
    elif not isinstance(zero, int) or isinstance(zero, bool):
        raise RefusedError(MissCode.DTYPE, correction, "the zero point is no integer")
    if dtype_of(node) != torch.int32 or dtype_of(product.node) != torch.int32:
        _check_width(node, product, zero)
    unshifted = _unshifted(product.x) if number_of(zero) == _UNSIGNED_SHIFT else None
    if unshifted is not None:
        return IntMmShiftSite(node, product, unshifted, None)
    return IntMmShiftSite(node, product, product.x, zero)


def _read_correction(correction: Node, product: IntProduct) -> tuple[Argument, Node]:
    """Return the zero point and the sums of the weight that a correction multiplies."""
    a = arguments(correction)
    for zero, sums in ((a["self"], a["other"]), (a["other"], a["self"])):
        if isinstance(sums, Node) and column_sum(sums, product):
            return zero, sums
    text = "it is not corrected by the sums of its own weight over K"
    raise RefusedError(MissCode.PATTERN, correction, text)


def _check_width(node: Node, product: IntProduct, zero: Argument) -> None:
    """Check that 32 bits hold every sum, for a difference that is taken in 64.

    Raises:
        RefusedError: They may not.
    """
    number = number_of(zero)
    bounds = (number, number) if number is not None else None
    if bounds is None and isinstance(zero, Node):
        bounds = bounds_of(zero)
    small = bounds is not None and -255 <= bounds[0] <= bounds[1] <= 255  # noqa: PLR2004
    # |x - zero| <= 510 and |w| <= 128.
    if not small or any(size > _EXACT_TERMS for size in shape_of(product.weight)):
        text = "the difference is taken in {}, where it may not wrap as 32 bits do"
        raise RefusedError(MissCode.DTYPE, node, text, dtype_of(node))


def _unshifted(x: Node) -> Node | None:
    """Return the int8 ``y`` of ``uint8(int32(y) + 128)``."""
    if dtype_of(x) != torch.uint8 or not is_call(x, aten._to_copy.default):
        return None
    shifted = arguments(x)["self"]
    if not is_call(shifted, aten.add.Tensor):
        return None
    a = arguments(node_of(shifted))
    wide = a["self"]
    if a["alpha"] != 1 or number_of(a["other"]) != _UNSIGNED_SHIFT or not isinstance(wide, Node):
        return None
    if dtype_of(wide) not in {torch.int16, torch.int32, torch.int64}:
        return None
    y = integers_behind(wide)
    return y if y is not None and dtype_of(y) == torch.int8 else None
