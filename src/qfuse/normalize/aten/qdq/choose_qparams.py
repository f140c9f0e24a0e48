"""Match a scale computed from the maximum magnitude as ``choose_qparams``."""

from __future__ import annotations

import math

import torch
from torch.fx.node import Argument

from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import Quantize, as_quantize
from qfuse.ir.ops.views import dtype_of, result_of, shape_of
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.ir.sizes import same_size
from qfuse.rewrite.pattern import (
    ANY,
    Arg,
    Capture,
    Either,
    Literal,
    Match,
    PatternRule,
    Step,
    V,
    Via,
    op,
)
from qfuse.rewrite.pattern.guards import guard, let
from qfuse.rewrite.prelude import Exactness, MissCode, Node, Rewriter, aten

# The reference returns the scale of a float16 tensor in float32.
X = V("x", (torch.float32, torch.bfloat16, torch.float64))
EPS = Arg("eps")
SCALE, QUANTIZE = Capture[Node]("scale"), Capture[Quantize]("quantize")


def _values(node: Node) -> Node | None:
    """Return the ``max`` along an axis whose values, and not indices, are ``node``."""
    found = result_of(node)
    return found[0] if found is not None and found[1] == 0 else None


_SIZE, _DIMS, _KEEPDIM = op(aten.abs.default, X), Arg("dims"), Arg("keepdim")
_PEAK = Either(
    op(aten.amax.default, _SIZE, _DIMS, _KEEPDIM),
    Via(op(aten.max.dim, _SIZE, _DIMS, _KEEPDIM), Step("values", _values)),
)
_NO_LEAST = MissCode.PATTERN, "{found} has no least value, as clamp(min=...) gives one"
_NO_ZERO = MissCode.ZERO_POINT, "it is quantized with a zero point, which no op has chosen"


@guard(MissCode.GRANULARITY, "the maximum is over {dims} with keepdim={keepdim}, not the last axis")
def _is_of_rows(x: Node, dims: Argument, keepdim: Argument) -> bool:
    axes = list(dims) if isinstance(dims, (list, tuple)) else [dims]
    # Without `keepdim` the scale lacks an axis: a scale `[N]` of `[N, N]` would be one per column.
    return axes in ([-1], [len(shape_of(x)) - 1]) and keepdim is True


@guard(MissCode.ARGUMENT, "the maximum magnitude is clamped from above too")
def _is_open_above(most: Argument) -> bool:
    return most is None


@guard(MissCode.ARGUMENT, "the lower bound of the magnitude is {eps}, not a positive number")
def _is_normal(eps: Argument) -> bool:
    # A subnormal float32 bound may be rounded before it reaches the kernel.
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        return False
    return torch.finfo(torch.float32).tiny <= eps < math.inf


def _quantize(node: Node) -> Quantize:
    found = as_quantize(node)
    assert found is not None, "the pattern starts with a quantize"
    return found


@guard(MissCode.RANGE, "the range of {quantize.params.spec} is not symmetric")
def _is_symmetric(quantize: Quantize) -> bool:
    spec = quantize.params.spec
    top = spec.quant_max
    return spec.dtype is torch.int8 and top > 0 and spec.quant_min in {-top, -top - 1}


@guard(
    MissCode.RANGE, "the scale divides by {divisor}, not by the largest quantized value", "scale"
)
def _divides_by_top(quantize: Quantize, divisor: Argument) -> bool:
    # 127.5, as torchao divides, gives other scales than 127.
    return not isinstance(divisor, (bool, Node)) and bool(divisor == quantize.params.spec.quant_max)


@guard(MissCode.GRANULARITY, "it is not quantized by rows")
def _is_by_rows(quantize: Quantize, scale: Node) -> bool:
    sizes = zip(shape_of(quantize.x)[:-1], quantize.params.spec.block[:-1], strict=True)
    rows = all(block == 1 or same_size(size, 1) for size, block in sizes)
    return rows and dtype_of(scale) == dtype_of(quantize.x)


class ChooseChain(PatternRule):
    """``amax(abs(x), -1, keepdim).clamp(min=eps) / quant_max`` becomes ``choose_qparams``.

    Before::

        x -> abs -> amax(-1) -> clamp(min=1e-5) -> div(127) -> scale
        x, scale -> quantize int8[-128,127]

    After::

        x -> choose_qparams "token-symmetric int8[-128,127] ..." -> scale
        x, scale -> quantize int8[-128,127]

    Exact: the maximum magnitude is that of the smallest or of the largest element, and the rest is
    the same arithmetic in the same dtype. It matches only where ``x`` is quantized with the scale.

    Refuses: a scale that is computed otherwise, or from other data than is quantized; another
    divisor than the largest quantized value; an asymmetric range, except for one more value below;
    a zero point; a clamp with an upper bound, or whose smallest scale is not positive and finite;
    a maximum of anything but whole rows; float16, which the reference computes in float32.
    """

    name = "choose-chain"
    exactness = Exactness.EXACT
    _least = Either(
        op(aten.clamp.default, _PEAK.given(_is_of_rows), EPS, Arg("most")).given(_is_open_above),
        op(aten.clamp_min.default, _PEAK.given(_is_of_rows), EPS),
    )
    pattern = op(
        ops.quantize,
        X,
        (_least.otherwise(*_NO_LEAST).given(_is_normal) / Arg("divisor")).core().named("scale"),
        Literal(None).otherwise(*_NO_ZERO),
        ANY,
        Literal(None).otherwise(*_NO_ZERO),
    ).given(let(QUANTIZE, _quantize), _is_symmetric, _divides_by_top, _is_by_rows)

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Add the canonical op in place of the scale's computation."""
        spec, real = site[QUANTIZE].params.spec, dtype_of(site[X])
        eps = site[EPS]
        assert isinstance(eps, (int, float)), "the guard checks that it is a number"
        bounds = spec.quant_min, spec.quant_max
        choose = ChooseSpec(
            Formula.TOKEN_SYMMETRIC, spec.dtype, *bounds, spec.block, float(eps), real, real
        )
        # The scale may have users in front of the quantize, so the choice takes its place.
        with rw.before(site[SCALE]):
            scale = rw.item(rw.call(ops.choose_qparams, site[X], str(choose)), 0)
        rw.replace(site[SCALE], scale)
