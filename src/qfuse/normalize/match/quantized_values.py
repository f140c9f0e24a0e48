"""Quantized values behind casts, views and the subtraction of a zero point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx.node import Argument

from qfuse.ir.dtypes import COMPUTE_DTYPES, exact_integers
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.qdq import as_quantize
from qfuse.ir.ops.value_range import bounds_of
from qfuse.ir.ops.views import dtype_of, node_of
from qfuse.ir.quant.element import Element, ScaleFormat
from qfuse.ir.quant.spec import Arithmetic, Block, QuantSpec, dtype_range
from qfuse.ir.sizes import Size, same_shape
from qfuse.normalize.match.quotients import may_divide_by_zero
from qfuse.normalize.match.views import view_source
from qfuse.rewrite.pattern import (
    Capture,
    Match,
    Maybe,
    Operand,
    Path,
    Pattern,
    Step,
    V,
    guard,
    match,
    through,
)
from qfuse.rewrite.prelude import MissCode, Node, Rewriter, arguments, aten

STORED = (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes whose values are all exact in every float dtype that models compute in."""

_FULL = (torch.float32, torch.float64)
_WIDE_INTEGERS = (torch.int16, torch.int32, torch.int64)
_EXACT_FOR_16_BITS = (torch.int32, torch.int64)
_STEPS = 8


Q: Capture[Node] = V("q", STORED)
"""The quantized values."""

ZERO: Capture[Argument] = Operand("zero")
"""The zero point that is subtracted from them: a node or a number."""

VIEWS_OF_Q: Capture[Path] = Capture("views_of_q")


def _exact_cast(node: Node) -> Node | None:
    # 8-bit values are exact in all of these.
    exact = dtype_of(node) in COMPUTE_DTYPES or dtype_of(node) in _WIDE_INTEGERS
    return cast_source(node) if exact else None


def _wide_view(node: Node) -> Node | None:
    # A view of the stored values themselves belongs to `q`.
    return None if dtype_of(node) in STORED else view_source(node)


def _exact_cast_of_16_bits(node: Node) -> Node | None:
    exact = dtype_of(node) in {*_FULL, *_EXACT_FOR_16_BITS}
    return cast_source(node) if exact else None


_EXACT_CAST = Step("exact cast", _exact_cast)
_EXACT_CAST_OF_16_BITS = Step("exact cast of 16 bits", _exact_cast_of_16_bits)
_WIDE_VIEW = Step("view", _wide_view)
_DIFFERENCES = Capture[Path]("casts_of_difference")


@guard(MissCode.PATTERN, "only the integer part of {q.dtype} values is used")
def _keeps_fractions(q: Node, casts_of_difference: Path | None, views_of_q: Path) -> bool:
    """A float8 value cast to an integer loses its fraction, so it is another value."""
    steps = views_of_q.nodes[1:] + (casts_of_difference.nodes if casts_of_difference else ())
    return not dtype_of(q).is_floating_point or all(dtype_of(n).is_floating_point for n in steps)


def _shifted(q: Capture[Node], exact_cast: Step, wide: Sequence[torch.dtype]) -> Pattern:
    """Return the pattern of ``q`` behind exact casts and views, and perhaps shifted."""
    plain = through(q, exact_cast, _WIDE_VIEW, path=VIEWS_OF_Q)
    # A difference in the dtype of the quantized values wraps: its result is another set of them.
    difference = (plain - ZERO).giving(*wide)
    return Maybe(through(difference, exact_cast, path=_DIFFERENCES), plain).given(_keeps_fractions)


QUANTIZED = _shifted(Q, _EXACT_CAST, (*COMPUTE_DTYPES, *_WIDE_INTEGERS))
"""``view(cast(Q)) - ZERO``, the float value in units of the scale.

Every op is exact: the casts widen, and the difference of two 8-bit values fits in every float dtype
and in every integer dtype of more bits. The rule checks that the zero point is an 8-bit value.
"""


@guard(MissCode.NOT_QUANTIZED, "no quantize returned these values of 16 bits", at="q")
def _is_quantized(q: Node) -> bool:
    # Constants of 16 bits are weights that no kernel reads, and smaller than in float.
    return as_quantize(q) is not None


_HALVES = V("q", torch.int16).given(_is_quantized)
QUANTIZED_TO_16_BITS = _shifted(_HALVES, _EXACT_CAST_OF_16_BITS, (*_FULL, *_EXACT_FOR_16_BITS))
"""The same with the result of a quantize to int16.

A 16-bit float does not hold these values, nor does int16 their differences.
"""


@dataclass(frozen=True, slots=True)
class QuantizedValues:
    """The match of :data:`QUANTIZED`.

    Attributes:
        q: The quantized values, of one of the ``STORED`` types.
        views: Views between ``q`` and the value, from ``q`` outward.
        zero: The subtrahend: a node, a number or ``None``. It has the shape of the value, or
            broadcasts to it.
    """

    q: Node
    views: tuple[Node, ...] = ()
    zero: Argument = None

    @staticmethod
    def of(found: Match) -> QuantizedValues:
        """Return the captures of a pattern that contains :data:`QUANTIZED`."""
        return QuantizedValues(found[Q], found[VIEWS_OF_Q].of(_WIDE_VIEW), found.get(ZERO))

    def build(self, rw: Rewriter) -> Node:
        """Return the quantized values in the shape of the value."""
        q = self.q
        for view in self.views:
            rest = [v for k, v in arguments(view).items() if k != "self"]
            q = rw.call(view.target, q, *rest)  # type: ignore[arg-type]
        return q


def quantized_values(value: object) -> QuantizedValues | None:
    """View ``value`` as quantized values that were cast, reshaped and shifted."""
    found = match(QUANTIZED, value) if isinstance(value, Node) else None
    return QuantizedValues.of(found) if isinstance(found, Match) else None


def integers_of(value: Node) -> Node | None:
    """Return the integers that ``value`` holds as floats; ``None`` if it may hold other values.

    They are floats where arithmetic rounded and clamped them: :func:`as_integers` casts these. A
    NaN has no cast, so none may come from a zero scale.
    """
    node = value
    while dtype_of(node).is_floating_point:
        source = cast_source(node)
        if source is None:
            return node if _is_int32(node) and not may_divide_by_zero(node) else None
        if not keeps_integers(source, dtype_of(node)):
            return None
        node = source
    return node


def as_integers(rw: Rewriter, zero: Node) -> Node:
    """Return what :func:`integers_of` found in an integer dtype."""
    if not dtype_of(zero).is_floating_point:
        return zero
    return rw.call(aten._to_copy.default, zero, dtype=torch.int32)


def _is_int32(node: Node) -> bool:
    bounds = bounds_of(node)
    info = torch.iinfo(torch.int32)
    return bounds is not None and info.min <= bounds[0] and bounds[1] <= info.max


def keeps_integers(source: Node, dtype: torch.dtype) -> bool:
    """Whether a cast of zero points to a float dtype is exact enough.

    A wide dtype always is: ``qfuse.dequantize`` computes in it too, and would round the same way.
    """
    if dtype in _FULL:
        return True
    bounds = bounds_of(source)
    low, high = exact_integers(dtype)
    return dtype in COMPUTE_DTYPES and bounds is not None and low <= bounds[0] and bounds[1] <= high


def spec_of_dequantize(
    stored: Node,
    shape: Sequence[Size],
    grid: Sequence[Size],
    float_dtype: torch.dtype,
    block: Block,
) -> QuantSpec:
    """Return the spec of a dequantize, from the quantize that computed its operand if there is one.

    Args:
        stored: The quantized values, in any shape.
        shape: The shape in which they are dequantized.
        grid: The shape of their scale, of the same rank.
        float_dtype: Float dtype of the result.
        block: The block that ``grid`` implies; the quantize may be more specific where an axis is
            1.
    """
    root: Node | None = stored
    made = None
    # The quantize knows the range; the dtype alone would allow every value.
    while root is not None and made is None:
        made = as_quantize(root)
        root = view_source(root)
    whole_range = full_range_spec(stored, block, float_dtype)
    if made is None:
        return whole_range
    spec = made.params.spec
    # The blocks of the quantize apply only if they have the same grid in this shape.
    if spec.rank == len(shape) and same_shape(spec.grid(shape), grid):
        block = spec.block
    arithmetic = replace(spec.arithmetic, compute=whole_range.arithmetic.compute)
    if not spec.is_plain:
        # Here they are multiplied by one float per block, in whatever format the scales were.
        whole, plain = Element.WHOLE, ScaleFormat.FLOAT
        spec = replace(spec, element=whole, scale_format=plain, outer=None)
    return replace(spec, block=block, float_dtype=float_dtype, arithmetic=arithmetic)


def moved_constant(node: Node) -> tuple[Node, torch.Tensor] | None:
    """Return the constant that ``node`` is a view of, and its value in the shape of ``node``.

    The value shares the constant's memory, whatever its size.
    """
    path: list[Node] = []
    for _ in range(_STEPS):
        value = constant_of(node)
        if value is not None:
            root = node
            for step in reversed(path):
                rest = [v for k, v in arguments(step).items() if k != "self"]
                assert callable(step.target), "the views are calls of ops"
                value = step.target(value, *rest)
            assert isinstance(value, torch.Tensor), "a view of a tensor is one"
            return root, value
        if not is_call(node, *_MOVES):
            return None
        path.append(node)
        node = node_of(arguments(node)["self"])
    return None


_MOVES = (
    aten.view.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.alias.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.slice.Tensor,
    aten.select.int,
)


def full_range_spec(q: Node, block: Block, float_dtype: torch.dtype) -> QuantSpec:
    """Return the spec of quantized values of which only the dtype is known."""
    dtype, compute = dtype_of(q), torch.float64 if float_dtype is torch.float64 else torch.float32
    return QuantSpec(dtype, *dtype_range(dtype), block, float_dtype, Arithmetic(compute))
