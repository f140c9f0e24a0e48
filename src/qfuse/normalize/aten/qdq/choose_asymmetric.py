"""Match a scale and a zero point computed from minimum and maximum as ``choose_qparams``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.qdq import Quantize, as_quantize
from qfuse.ir.ops.value_range import is_zero
from qfuse.ir.ops.views import dtype_of, node_of, result_of, shape_of
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.ir.quant.spec import Block
from qfuse.ir.sizes import same_size
from qfuse.normalize.match.views import VIEW
from qfuse.rewrite.pattern import (
    ANY,
    CAST,
    Capture,
    Either,
    Match,
    Num,
    Pattern,
    PatternRule,
    Read,
    V,
    Via,
    bind,
    guard,
    let,
    op,
    through,
)
from qfuse.rewrite.prelude import Exactness, MissCode, Node, OpOverload, Rewriter, arguments, aten


@dataclass(frozen=True, slots=True)
class Extreme:
    """The minimum or maximum of a tensor, or zero if that is beyond.

    Attributes:
        node: The value.
        x: The tensor.
        rows: Whether it is one number per row; otherwise one for the tensor.
    """

    node: Node
    x: Node
    rows: bool


@dataclass(frozen=True, slots=True)
class _Kind:
    """The ops that compute a minimum, or a maximum.

    Attributes:
        reduce: The reduction over given axes.
        whole: The reduction over all axes.
        indexed: The reduction that also returns indices.
        place: The index among the results of ``aminmax``.
        bound: The op that takes the minimum or maximum with a number.
        pair: The op that takes it with a tensor.
        name: The argument of ``clamp``.
    """

    reduce: OpOverload
    whole: OpOverload
    indexed: OpOverload
    place: int
    bound: OpOverload
    pair: OpOverload
    name: str


_LEAST = _Kind(
    aten.amin.default,
    aten.min.default,
    aten.min.dim,
    0,
    aten.clamp_max.default,
    aten.minimum.default,
    "max",
)
_MOST = _Kind(
    aten.amax.default,
    aten.max.default,
    aten.max.dim,
    1,
    aten.clamp_min.default,
    aten.maximum.default,
    "min",
)


def _lowest(node: Node) -> Extreme | None:
    return _extreme(node, _LEAST)


def _highest(node: Node) -> Extreme | None:
    return _extreme(node, _MOST)


def _extreme(node: Node, kind: _Kind) -> Extreme | None:
    """View the extreme of ``node``'s operand and zero."""
    of = _bounded_by_zero(node, kind)
    found = None if of is None else _reduced(of, kind)
    if found is None:
        return None
    x, axes, keeps = found
    if axes is None:
        return Extreme(node, x, rows=False)
    # Without `keepdim` the scale lacks an axis: a scale `[N]` of `[N, N]` would be one per column.
    is_last = list(axes) in ([-1], [len(shape_of(x)) - 1])
    return Extreme(node, x, rows=True) if is_last and keeps is True else None


def _bounded_by_zero(node: Node, kind: _Kind) -> Node | None:
    """Return the other operand of a minimum or maximum with zero."""
    a = arguments(node) if overload_of(node) is not None else {}
    if is_call(node, kind.bound):
        return node_of(a["self"]) if _is_zero_number(a[kind.name]) else None
    if is_call(node, aten.clamp.default):
        open_end = a["min" if kind.name == "max" else "max"] is None
        is_bound = _is_zero_number(a[kind.name]) and open_end
        return node_of(a["self"]) if is_bound else None
    if is_call(node, kind.pair):
        one, other = node_of(a["self"]), node_of(a["other"])
        # The type and shape have to be those of the extreme.
        for x, zero in ((one, other), (other, one)):
            if is_zero(zero) and dtype_of(x) == dtype_of(node) and _fits(shape_of(x), node):
                return x
    return None


def _fits(shape: Sequence[object], node: Node) -> bool:
    return tuple(shape) == tuple(shape_of(node))


def _is_zero_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == 0


def _reduced(node: Node, kind: _Kind) -> tuple[Node, Sequence[object] | None, object] | None:
    """Return operand, axes and ``keepdim`` of a reduction; the axes are ``None`` for all."""
    if is_call(node, kind.whole):
        return node_of(arguments(node)["self"]), None, False
    if is_call(node, kind.reduce):
        a = arguments(node)
        axes = a["dim"]
        axes = list(axes) if isinstance(axes, (list, tuple)) else [axes]
        return node_of(a["self"]), axes or None, a["keepdim"]
    found = result_of(node)
    if found is None:
        return None
    call, index = found
    if is_call(call, kind.indexed) and index == 0:
        a = arguments(call)
        return node_of(a["self"]), [a["dim"]], a["keepdim"]
    if is_call(call, aten.aminmax.default) and index == kind.place:
        a = arguments(call)
        axes = None if a["dim"] is None else [a["dim"]]
        return node_of(a["self"]), axes, a["keepdim"]
    return None


# The formula computes bfloat16 in its own dtype; its scale of a float16 tensor may overflow.
X = V("x", (torch.float32, torch.bfloat16, torch.float64))
LOW = Read("low", _lowest, "minimum of the rows or zero")
HIGH = Read("high", _highest, "maximum of the rows or zero")
TOP, EPS = Num("top"), Num("eps")
SCALE, ZERO = V("scale"), V("zero")
FROM, LEAST, MOST = Num("from"), Num("least"), Num("most")
QUANTIZE = Capture[Quantize]("quantize")

_STEP = (HIGH - LOW) / TOP
STEP = Either(op(aten.clamp.default, _STEP, EPS), op(aten.clamp_min.default, _STEP, EPS))
"""The scale: ``clamp((HIGH - LOW) / TOP, min=EPS)``."""

_NO_SCALE = MissCode.PATTERN, "{found} is not a clamped step from the minimum to the maximum"


def _round(value: Pattern) -> Pattern:
    return op(aten.round.default, value)


_RATIO = _round(LOW / SCALE)
_BELOW = Either(
    _round(op(aten.neg.default, LOW) / SCALE),
    _round(op(aten.neg.default, LOW / SCALE)),
    op(aten.neg.default, _RATIO),
)
SHIFTED = Either(
    op(aten.rsub.Scalar, _RATIO, FROM),
    op(aten.add.Tensor, _BELOW, FROM),
    _BELOW.given(bind(FROM, 0)),
)
"""The zero point: ``FROM - round(LOW / SCALE)``."""

_ZERO = op(aten.clamp.default, SHIFTED, LEAST, MOST).named(ZERO.label)


def _quantize(node: Node) -> Quantize:
    found = as_quantize(node)
    assert found is not None, "the pattern starts with a quantize"
    return found


@guard(MissCode.RANGE, "the step is a part of {top}, and there are other quantized values", "scale")
def _has_range(quantize: Quantize, top: float) -> bool:
    spec = quantize.params.spec
    return bool(top == spec.quant_max - spec.quant_min)


@guard(MissCode.ZERO_POINT, "the zero point is not chosen for the range of {quantize.params.spec}")
def _is_chosen_for_range(quantize: Quantize, match: Match) -> bool:
    spec = quantize.params.spec
    known = [match.bound[name.label] for name in (FROM, LEAST, MOST)]
    return known == [spec.quant_min, spec.quant_min, spec.quant_max]


@guard(MissCode.ARGUMENT, "the lower bound of the scale is {eps}, not a positive normal number")
def _is_normal(eps: float) -> bool:
    return torch.finfo(torch.float32).tiny <= eps < math.inf


@guard(MissCode.GRANULARITY, "the parameters are not chosen for what is quantized with them")
def _is_own(quantize: Quantize, low: Extreme, high: Extreme) -> bool:
    x, block = quantize.x, quantize.params.spec.block
    same = low.x is x and high.x is x and low.rows == high.rows
    return same and _is_block(x, block, rows=low.rows)


def _is_block(x: Node, block: Block, *, rows: bool) -> bool:
    if not rows:
        return all(size is None for size in block)
    lead = zip(shape_of(x)[:-1], block[:-1], strict=True)
    return block[-1] is None and all(b == 1 or same_size(size, 1) for size, b in lead)


class ChooseAsymmetric(PatternRule):
    """Scale and zero point computed from ``amin`` and ``amax`` become ``choose_qparams``.

    Before::

        x -> amin -> clamp(max=0) --+-> sub -> div(255) -> clamp(min=eps) -> scale
        x -> amax -> clamp(min=0) --'
        neg(low) / scale -> round -> clamp(0, 255) -> cast int32 -> zero point
        x, scale, zero point -> quantize uint8[0,255]

    After::

        x -> choose_qparams "ao-asymmetric uint8[0,255] ..." -> scale, zero point
        x, scale, zero point -> quantize uint8[0,255]

    Per row or per tensor, for int8 and uint8, and for fewer bits.

    Exact: the same arithmetic in the same dtype. It matches only where ``x`` is quantized with the
    parameters.

    Refuses: an interval that may lack zero; a scale without a least value, or that is bounded
    before the division; a zero point that is shifted before it is rounded, is not clamped, or is
    for another range than the quantize; parameters of other data, or along other axes; float16.
    """

    name = "choose-asymmetric"
    exactness = Exactness.EXACT
    pattern = op(
        ops.quantize,
        X,
        through(STEP.otherwise(*_NO_SCALE).core().named(SCALE.label), VIEW),
        through(Via(_ZERO, CAST), VIEW),
        ANY,
        None,
    ).given(let(QUANTIZE, _quantize), _has_range, _is_chosen_for_range, _is_normal, _is_own)

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Add the canonical op, and use its results at the quantize and elsewhere."""
        quantize = site[QUANTIZE]
        spec, real = quantize.params.spec, dtype_of(site[X])
        bounds = spec.quant_min, spec.quant_max
        choose = ChooseSpec(
            Formula.AO_ASYMMETRIC,
            spec.dtype,
            *bounds,
            spec.block,
            float(site[EPS]),
            real,
            torch.int32,
        )
        # The parameters may have users in front of the quantize.
        with rw.before(site[SCALE]):
            made = rw.call(ops.choose_qparams, site[X], str(choose))
            scale, zero = rw.item(made, 0), rw.item(made, 1)
            rw.replace(site[SCALE], _viewed(rw, scale, site[SCALE]))
        for user in list(site[ZERO].users):
            if cast_source(user) is site[ZERO] and not dtype_of(user).is_floating_point:
                with rw.before(user):
                    rw.replace(user, _viewed(rw, _cast(rw, zero, dtype_of(user)), user))
        new = rw.call(ops.quantize, site[X], scale, zero, str(spec))
        rw.replace(site.node, new)


def _cast(rw: Rewriter, zero: Node, dtype: torch.dtype) -> Node:
    if dtype_of(zero) == dtype:
        return zero
    return rw.call(aten._to_copy.default, zero, dtype=dtype)


def _viewed(rw: Rewriter, param: Node, like: Node) -> Node:
    """Return a parameter for the whole tensor in the rank of ``like``."""
    if len(shape_of(param)) == len(shape_of(like)):
        return param
    return rw.call(aten.view.default, param, [1] * len(shape_of(like)))
