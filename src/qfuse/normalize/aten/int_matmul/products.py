"""Products of quantized integers with exact sums, and the sums of their weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx.node import Argument

from qfuse.ir.dtypes import BYTES
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.views import dtype_of, node_of, shape_of
from qfuse.normalize.match.quantized_values import moved_constant
from qfuse.normalize.match.views import transpose_source
from qfuse.rewrite.pattern import (
    ANY,
    Arg,
    Capture,
    Either,
    Path,
    Step,
    V,
    match,
    op,
    through,
    where,
)
from qfuse.rewrite.prelude import Miss, MissCode, Node, arguments, aten

_SUMS = (torch.int32, torch.int64)
_WIDER = (torch.int16, *_SUMS)
_WIDE_FLOATS = (torch.float32, torch.float64)
# 255 * 2^16 < 2^24: the sum of that many 8-bit values is exact in float32, in any order.
_EXACT_TERMS = 1 << 16
_MATRIX = 2


@dataclass(frozen=True, slots=True)
class IntProduct:
    """``(x - zero) @ weight`` in integers.

    Attributes:
        node: The product, ``int32`` or ``int64``.
        x: 8-bit activation of shape ``[..., K]``.
        zero: The subtrahend of ``x``: a node, a number, or ``None``.
        weight: The constant that holds the 8-bit weight.
        rows: Whether its shape is ``[N, K]``; otherwise it is ``[K, N]``.
    """

    node: Node
    x: Node
    zero: Argument
    weight: Node
    rows: bool


def _widened(node: Node) -> Node | None:
    # A cast to bool, or to 8 bits, changes values.
    return cast_source(node) if dtype_of(node) in _WIDER else None


def _wide_float(node: Node) -> Node | None:
    return cast_source(node) if dtype_of(node) in _WIDE_FLOATS else None


def _copied(node: Node) -> Node | None:
    copies = is_call(node, aten.clone.default, aten.alias.default)
    return node_of(arguments(node)["self"]) if copies else None


WIDENING = Step("widening cast", _widened, (aten._to_copy.default,))
_WIDE_FLOAT = Step("cast to a wide float type", _wide_float, (aten._to_copy.default,))
_COPY = Step("copy", _copied, (aten.clone.default, aten.alias.default))
_TRANSPOSE = Step("transpose", transpose_source)

FACTOR_STEPS = (_TRANSPOSE, _COPY, WIDENING)
"""Ops that may stand between a weight and its product."""

X, ZERO, WEIGHT = V("x", BYTES), Arg("zero"), V("weight", BYTES, rank=_MATRIX)
TO_WEIGHT = Capture[Path]("to_weight")
_CONSTANT = WEIGHT.given(
    where(lambda weight: constant_of(weight) is not None, MissCode.NOT_CONSTANT, "{weight} varies")
)
_NUMBER = where(lambda zero: not isinstance(zero, bool), MissCode.PATTERN, "it is a bool")
_WIDE_X = through(X, WIDENING)
# A difference of 8-bit values in 8 bits wraps, so it counts as an activation, not as a shift.
_LEFT = Either(_WIDE_X, (_WIDE_X - ZERO.given(_NUMBER)).giving(*_WIDER))
_RIGHT = through(_CONSTANT, *FACTOR_STEPS, path=TO_WEIGHT)
# `mm` of int8 without casts returns int8, which wraps, so the result has to be wide.
INT_PRODUCT = Either(
    op((aten.mm.default, aten._int_mm.default), _LEFT, _RIGHT),
    op(aten.matmul.default, _LEFT, _RIGHT),
).giving(*_SUMS)
"""A product of an 8-bit activation and a constant 8-bit weight; see :func:`as_int_product`."""

_SUMMED = op(
    aten.sum.dim_IntList,
    through(_CONSTANT, _TRANSPOSE, _COPY, WIDENING, _WIDE_FLOAT, path=TO_WEIGHT),
    Arg("dims"),
    ANY,
    dtype=Arg("dtype"),
)


_LEFT_WEIGHT = op(aten.mm.default, _RIGHT, through(X, _TRANSPOSE, _COPY, WIDENING)).giving(*_SUMS)


def has_weight_on_the_left(node: Node) -> bool:
    """Whether ``node`` is a matrix product of a constant 8-bit weight and an 8-bit activation."""
    if not is_call(node, aten.mm.default) or as_int_product(node) is not None:
        return False
    return not isinstance(match(_LEFT_WEIGHT, node), Miss)


def as_int_product(value: Node) -> IntProduct | None:
    """View ``value`` as the product of an 8-bit activation and a constant 8-bit weight."""
    assert INT_PRODUCT.heads is not None, "it is a call"
    found = match(INT_PRODUCT, value) if is_call(value, *INT_PRODUCT.heads) else None
    if found is None or isinstance(found, Miss):
        return None
    # The right factor is `[K, N]`: an odd number of transposes in front means `[N, K]` in memory.
    rows = len(found[TO_WEIGHT].of(_TRANSPOSE)) % 2 == 1
    return IntProduct(value, found[X], found.get(ZERO), found[WEIGHT], rows)


def is_column_sum(value: Node, weight: Node, *, rows: bool) -> bool:
    """Whether ``value`` is the sum of a weight over K, per output feature.

    It may be a reduction in the graph, wide enough not to wrap, or a constant that was summed
    ahead of time.

    Args:
        value: The sums.
        weight: The constant.
        rows: Whether its shape is ``[N, K]``; otherwise it is ``[K, N]``.
    """
    moved = moved_constant(value)
    if moved is not None:
        return _are_sums(moved[1], weight, 1 if rows else 0)
    found = match(_SUMMED, value) if is_call(value, aten.sum.dim_IntList) else None
    if found is None or isinstance(found, Miss):
        return False
    turned = len(found[TO_WEIGHT].of(_TRANSPOSE)) % 2 == 1
    dims, dtype = found.bound["dims"], found.bound["dtype"]
    axis = 1 if turned != rows else 0
    # Without a dtype torch sums integers in int64. A sum in 8 or 16 bits would wrap, and one of
    # more than 2^16 terms may be rounded in float32.
    return (
        found[WEIGHT].target == weight.target
        and dtype in {None, *_SUMS, *_WIDE_FLOATS}
        and isinstance(dims, (list, tuple))
        and [d % _MATRIX for d in dims if isinstance(d, int)] == [axis]
        and not any(size > _EXACT_TERMS for size in shape_of(weight))
    )


def multiple_of_sums(value: torch.Tensor, weight: Node, *, rows: bool) -> int | None:
    """Return the integer whose product with the sums of a weight over K is ``value``.

    Args:
        value: One integer per output feature.
        weight: The constant.
        rows: Whether its shape is ``[N, K]``; otherwise it is ``[K, N]``.

    Returns:
        ``None`` if there is none, if every sum is 0, or if there are no values to compare.
    """
    held = constant_of(weight)
    if held is None or held.is_meta or value.is_meta or value.dtype not in _SUMS:
        return None
    sums, own = held.sum(1 if rows else 0, dtype=torch.int64), value.reshape(-1).long()
    first = sums.nonzero()[:1].reshape(-1)
    if own.shape != sums.shape or not first.numel():
        return None
    factor = int(own[first]) // int(sums[first])
    return factor if torch.equal(own, sums * factor) else None


def _are_sums(value: torch.Tensor, weight: Node, axis: int) -> bool:
    known = moved_constant(weight)
    # Without values nothing shows that these are the sums of this weight.
    if known is None or value.is_meta or known[1].is_meta:
        return False
    summed = known[1].sum(axis, dtype=torch.int64)
    return value.numel() == summed.numel() and torch.equal(
        value.reshape(-1).double(), summed.double()
    )
