"""Match divide, round, shift, clamp and cast as ``quantize``."""

from __future__ import annotations

import torch
from torch.fx.node import Argument

from qfuse.ir.dtypes import BYTES, COMPUTE_DTYPES
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.quant.spec import Arithmetic, QuantSpec, dtype_range
from qfuse.ir.sizes import same_shape
from qfuse.normalize.aten.qdq.scale_factor import Factor, inverse_factor, scale_factor, zero_factor
from qfuse.normalize.match.broadcast import block_of
from qfuse.rewrite.pattern import Match, Pattern, PatternRule, Step, Via
from qfuse.rewrite.pattern.captures import Capture, Num, Operand, V
from qfuse.rewrite.pattern.guards import bind, guard, let
from qfuse.rewrite.pattern.parts import Either, Maybe, Opt, op
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, Rewriter, aten

X, LOW, HIGH = V("x", COMPUTE_DTYPES), Num("low"), Num("high")
SCALE, INVERSE, ZERO = Operand("scale"), Operand("inverse"), Operand("zero_point")
# PyTorch has no unsigned integers of 16 bits to compute with.
_INTEGERS = (*BYTES, torch.int16)
DIVIDES, ZERO_FIRST = Capture[bool]("divides"), Capture[bool]("zero_first")
SCALED = Capture[Node]("scaled")
SCALE_FACTOR = Capture[Factor]("scale_factor")
ZERO_FACTOR = Capture[Factor | None]("zero_factor")


@guard(MissCode.RANGE, "the clamp [{low}, {high}] is not a range of {node.dtype}", at="clamped")
def _is_range(node: Node, low: float, high: float) -> bool:
    least, most = dtype_range(dtype_of(node))
    # The cast of 200 to int8 is undefined, and a clamp to 6.5 rounds to 6 or stays 6.5 depending on
    # which of clamp and round comes first.
    return least <= low <= high <= most and (low, high) == (int(low), int(high))


@guard(MissCode.SHAPE, "the parameters broadcast the quantized tensor", at="scaled")
def _keeps_shape(node: Node, x: Node, scaled: Node) -> bool:
    return all(same_shape(shape_of(each), shape_of(x)) for each in (scaled, node))


@guard(MissCode.DTYPE, "its intermediate values have several float dtypes")
def _keeps_type(node: Node, scaled: Node) -> bool:
    # A cast in the middle is a second rounding, which a spec does not have.
    return dtype_of(cast_source(node) or node) == dtype_of(scaled)


@guard(MissCode.ARITHMETIC, "a number in {scaled.dtype} does not round like a tensor", "scaled")
def _acts_as_a_tensor(scale: Argument, inverse: Argument, scaled: Node) -> bool:
    # In 16-bit arithmetic, torch rounds a tensor to the dtype first, but not a number or a scalar.
    by = scale if inverse is None else inverse
    wide = dtype_of(scaled) in {torch.float32, torch.float64}
    return wide or (isinstance(by, Node) and len(shape_of(by)) > 0)


@guard(MissCode.DTYPE, "{scaled.dtype} does not hold every integer of {node.dtype}", at="scaled")
def _holds_integers(node: Node, scaled: Node) -> bool:
    # The bound 32767 is 32768 there, whose cast is undefined.
    return dtype_of(node) in BYTES or dtype_of(scaled) in {torch.float32, torch.float64}


def _scale_factor(x: Node, scale: Argument, inverse: Argument, scaled: Node) -> Factor | Miss:
    if inverse is not None:
        return inverse_factor(scaled, inverse, shape_of(x), dtype_of(scaled))
    return scale_factor(scaled, scale, shape_of(x), dtype_of(scaled))


@guard(MissCode.RANGE, "its scale is zero", at="scaled")
def _is_positive(scale_factor: Factor) -> bool:
    value = scale_factor.value
    # A scale that is computed at run time cannot be checked.
    known = constant_value(scale_factor.home) if value is None else value
    # Dividing by zero gives infinities and NaN, whose cast to integers is undefined.
    return known is None or bool((known > 0).all())


def _zero_factor(node: Node, scale_factor: Factor, zero_point: Argument) -> Factor | Miss | None:
    return zero_factor(node, zero_point, scale_factor.shape, dtype_of(node))


def _float_source(node: Node) -> Node | None:
    source = cast_source(node) if dtype_of(node) in _INTEGERS else None
    return source if source is not None and dtype_of(source).is_floating_point else None


_FOUND = "found {found}"
_NEAREST = "aten.round to the nearest integer"
_BOUNDED = "aten.clamp to two numbers"
_BEFORE_CAST = f"before the cast to integers, {_FOUND}: out of range, the cast is undefined"


def _clamp(value: Pattern) -> Pattern:
    low = LOW.otherwise(MissCode.RANGE, "its clamp has no lower bound")
    high = HIGH.otherwise(MissCode.RANGE, "its clamp has no upper bound")
    clamped = op(aten.clamp.default, value, low, high).named("clamped")
    return clamped.otherwise(MissCode.RANGE, f"expected {_BOUNDED} {_BEFORE_CAST}")


def _round(value: Pattern) -> Pattern:
    return op(aten.round.default, value).otherwise(
        MissCode.PATTERN, f"expected {_NEAREST}, {_FOUND}"
    )


_RECIPROCAL = op(aten.reciprocal.default, SCALE)
_SCALED = Either(
    (X / SCALE).given(bind(DIVIDES, True)),
    X * Maybe(_RECIPROCAL * 1, _RECIPROCAL),
    X * INVERSE,
).named("scaled")
_SCALED = _SCALED.otherwise(
    MissCode.PATTERN, f"expected aten.div by a scale, or aten.mul by its inverse, {_FOUND}"
)
_ROUNDED = (_round(_SCALED) + Opt(ZERO)).otherwise(
    MissCode.PATTERN, f"expected {_NEAREST}, or its sum with a zero point, {_FOUND}"
)
CODES = Either(
    _clamp(_ROUNDED),
    # The order is recorded in the spec, since ties may round differently.
    _clamp(_round(_SCALED + Opt(ZERO))).given(bind(ZERO_FIRST, True)),
    # Rounding is monotone and keeps integers, so between integer bounds the two orders agree.
    _round(_clamp(_SCALED + Opt(ZERO))).given(bind(ZERO_FIRST, True)),
).otherwise(MissCode.RANGE, f"expected {_BOUNDED}, or aten.round of it, {_BEFORE_CAST}")
"""Values that are scaled, rounded and clamped."""

CHECKS = (
    *(_keeps_shape, _keeps_type, _acts_as_a_tensor),
    *(let(SCALE_FACTOR, _scale_factor), _is_positive),
)
"""What holds for their scale."""

_TO_CODES = Step("cast to integers", _float_source, (aten._to_copy.default,))


class QuantizeChain(PatternRule):
    """``clamp(round(x / scale) + zero_point, low, high)`` cast to integers becomes ``quantize``.

    Before::

        x -> div(scale) -> round -> add(zero_point) -> clamp(low, high) -> cast int8

    After::

        x, scale, zero_point -> qfuse.quantize

    Also with a product by the reciprocal instead of the quotient, with the zero point added before
    rounding, and with rounding after clamping to integers, which has the same quantized values. The
    integers have 8 bits, or 16: no kernel reads 16, and the report says so.

    Exact: the same operations in the same order and dtype, except for that last spelling.

    Refuses: a chain without a clamp, whose cast is undefined out of range; bounds that are not
    integers or exceed the dtype; 16 bits in a float dtype that does not hold them; rounding to
    decimals or down; a constant scale that is zero, negative or not finite; a scale that broadcasts
    ``x``; a reciprocal that no scale has, or that is computed at run time; a zero point that is not
    an integer; numbers as scales in 16-bit arithmetic, where they are rounded differently from
    tensors.
    """

    name = "quantize-chain"
    exactness = Exactness.EXACT
    pattern = (
        Via(CODES, _TO_CODES)
        .otherwise(MissCode.DTYPE, "{found} is not a cast of a float to 8 or 16 bits")
        .given(_is_range, _holds_integers, *CHECKS, let(ZERO_FACTOR, _zero_factor))
    )

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Build the parameters, then the quantize."""
        rw.replace(site.node, call_quantize(site, rw, dtype_of(site.node)))


def call_quantize(site: Match, rw: Rewriter, dtype: torch.dtype) -> Node:
    """Call ``quantize`` with the parameters of matched :data:`CODES`."""
    x, scale, zero = site[X], site[SCALE_FACTOR], site[ZERO_FACTOR]
    zero_first = ZERO_FIRST in site and zero is not None
    arithmetic = Arithmetic(dtype_of(site[SCALED]), DIVIDES not in site, zero_first)
    block = block_of(shape_of(x), scale.shape)
    assert block is not None, "the scale tiles x"
    bounds = int(site[LOW]), int(site[HIGH])
    spec = QuantSpec(dtype, *bounds, block, dtype_of(x), arithmetic)
    made = None if zero is None else zero.build(rw)
    return rw.call(ops.quantize, x, scale.build(rw), made, str(spec))
