"""Multiply the scale of a dequantize by factors, instead of its result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from qfuse.ir.ops import library as ops
from qfuse.ir.ops.constants import constant_params
from qfuse.ir.ops.qdq import Dequantize, Quantize, as_quantize
from qfuse.ir.ops.views import QuantParams, shape_of
from qfuse.ir.quant.block import covers
from qfuse.ir.quant.reference import dequantize, quantize
from qfuse.ir.quant.spec import Block, QuantSpec, ZeroPointDomain
from qfuse.ir.sizes import Size
from qfuse.optimize.fold.factor_chain import FactorChain, factor_chain
from qfuse.rewrite.prelude import (
    Exactness,
    Miss,
    MissCode,
    Node,
    OpOverload,
    Rewriter,
    Rule,
    aten,
)

# Far from the ends of the range of float32, whatever the quantized value of up to 16 bits is.
_LEAST, _MOST = 2.0**-64, 2.0**64
_HALF = 0.5
# Quantized values that are looked up: those of 4096 channels of 8 bits, or of 16 of 16 bits.
_MOST_VALUES = 1 << 20
# Scales that are tried, as steps between numbers of their type. A product with the rounded scale
# may lie on the other side of a tie than the two products of the source.
_STEPS = (0, 1, -1, 2, -2)


@dataclass(frozen=True, slots=True)
class RequantizedFactorSite:
    """Factors between a dequantize and quantizes.

    Attributes:
        chain: The dequantize and the factors.
        block: The block of the scale with the factors.
        scale: The scale with the factors.
        zero_point: The zero point of the same shape, if the dequantize has one.
        quantizes: The quantizes, whose ranges are those that clamps between the factors leave.
    """

    chain: FactorChain
    block: Block
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    quantizes: tuple[Quantize, ...]

    @property
    def dequantize(self) -> Dequantize:
        """The dequantize."""
        return self.chain.dequantize


@dataclass(frozen=True, slots=True)
class _User:
    """A quantize, and what it reads for every quantized value in front of the factors.

    Attributes:
        quantize: The quantize, in whose range all results are.
        values: The quantized values, ``[values, *axes]``.
        params: Its scale and zero point.
        results: The quantized results of the source.
    """

    quantize: Quantize
    values: torch.Tensor
    params: tuple[torch.Tensor, torch.Tensor | None]
    results: torch.Tensor

    def scaled(self, site: RequantizedFactorSite) -> torch.Tensor:
        """Return the results with the factors in the scale."""
        spec = _with_values(site.dequantize.params.spec.with_block(site.block))
        real = dequantize(self.values, *_along((site.scale, site.zero_point)), spec)
        return _quantized(real, self.params, self.quantize.params.spec)

    def agrees(self, site: RequantizedFactorSite) -> torch.Tensor:
        """Return for every scale whether all results with it are those of the source."""
        equal = (self.scaled(site) == self.results).all(0)
        for axis, size in enumerate(site.scale.shape):
            # Several elements share a scale: all of them have to agree, or all of several scales.
            if size != equal.shape[axis]:
                equal = equal.all(axis, keepdim=True)
        return equal.expand(site.scale.shape)

    def difference(self, site: RequantizedFactorSite) -> Miss:
        """Say which value would change."""
        new = self.scaled(site)
        place = tuple((self.results != new).nonzero()[0].tolist())
        what = "the factor is not a power of two: in the scale it would be rounded otherwise"
        if len(site.chain.steps) > 1:
            what = "in the scale the product of the factors would be rounded otherwise"
        if site.chain.is_clamped:
            what = "a clamp between the factors does not become a range"
        text = what + ", and the quantized value {:g} would become {:g} instead of {:g}"
        details = [float(each[place]) for each in (self.values, new, self.results)]
        return Miss(MissCode.ARGUMENT, site.chain.end, text, *details, progress=2)


class FoldRequantizedFactor(Rule[RequantizedFactorSite]):
    """``quantize(dequantize(q, s) * c, t)`` becomes ``quantize(dequantize(q, s * c), t)``.

    Before::

        q -> dequantize(s) -> mul(c) -> relu -> div(d) -> quantize(t)

    After::

        q -> dequantize(s * c / d) -> quantize(t) to [zero point, ...]

    Both are then one requantize. There may be several factors in a row, with clamps between them,
    which become the range of the quantize. A factor is a number, or one per channel; a quotient is
    a product with the inverse. Powers of two change the exponent only, so the floats are equal.
    With another factor the products are rounded otherwise. Both forms are computed for every
    quantized value that the type has, and the scale is the one nearest to ``s * c / d`` with which
    all results are equal.

    Refuses: products of factors that are not positive; a result that would differ, as for values at
    a tie; scales that are computed at run time (with powers of two and without clamps, that of the
    quantize may be); scales so large or small that a product leaves the normal range; users other
    than quantizes.
    """

    name = "fold-requantized-factor"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.mul.Tensor, aten.div.Tensor)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> RequantizedFactorSite | Miss:
        """Match factors between a dequantize and quantizes."""
        chain = factor_chain(node)
        if chain is None:
            return Miss(MissCode.PATTERN, node, "no dequantize is multiplied", progress=0)
        known = _quantizes(node)
        if not known:
            return Miss(MissCode.PATTERN, node, "it is not only quantized", progress=0)
        *_, factor = chain.scaled(torch.ones([1] * chain.dequantize.params.spec.rank).double())
        wrong = factor[~((factor > 0) & factor.isfinite())]
        if len(wrong):
            text = "a factor of {:.6g} is not positive and finite, as scales are"
            return Miss(MissCode.ARGUMENT, node, text, float(wrong[0]), progress=2)
        site = _scaled(chain, factor, known)
        return site if isinstance(site, Miss) or _shifts_exponents(site) else _looked_up(site)

    def rewrite(self, site: RequantizedFactorSite, rw: Rewriter) -> None:
        """Quantize what a dequantize with the other scale returns."""
        params = site.dequantize.params
        name = params.scale.name
        zero = params.zero_point
        points = site.zero_point
        # There is one for every scale.
        if zero is not None and points is not None and points.shape != shape_of(zero):
            zero = rw.constant(points.contiguous(), f"{zero.name}_expanded")
        made = QuantParams(
            params.spec.with_block(site.block), rw.constant(site.scale, f"{name}_scaled"), zero
        )
        scaled = replace(site.dequantize, params=made)
        real = rw.call(ops.dequantize, *scaled.call_args())
        # The quantized values are equal, the floats are not.
        for last in site.quantizes:
            with rw.instead_of(last.node):
                rw.replace(last.node, rw.call(ops.quantize, *replace(last, x=real).call_args()))


def _quantizes(node: Node) -> tuple[Quantize, ...]:
    """Return the users of a node, none if some do other than quantize it.

    A quantize may also have it as its scale.
    """
    found = [as_quantize(user) for user in node.users]
    known = [q for q in found if q is not None and q.x is node and node not in q.params.tensors]
    return tuple(known) if len(known) == len(found) else ()


def _scaled(
    chain: FactorChain, factor: torch.Tensor, quantizes: tuple[Quantize, ...]
) -> RequantizedFactorSite | Miss:
    """Return the dequantize with the factors in its scale."""
    params, end = chain.dequantize.params, chain.end
    spec, known = params.spec, constant_params(params)
    if known is None:
        text = "the scale is computed at run time"
        return Miss(MissCode.NOT_CONSTANT, params.scale, text, progress=2)
    if (
        not spec.is_plain
        or spec.domain is ZeroPointDomain.FLOAT_OFFSET
        or not _is_short(spec.dtype)
    ):
        return Miss(MissCode.DTYPE, end, "the values are not integers of 16 bits", progress=2)
    if not chain.keeps_type:
        text = "the factor changes the dtype or the shape of the dequantized values"
        return Miss(MissCode.DTYPE, end, text, progress=2)
    block = _block(spec.block, factor, shape_of(end))
    if block is None:
        text = "the factor varies within the blocks of {} that share a scale"
        return Miss(MissCode.GRANULARITY, end, text, spec.block_text(), progress=2)
    scale, zero = known
    # Two negative factors are a positive one.
    scales = [scale.double(), *chain.scaled(scale.double())]
    made = scales[-1].to(scale.dtype)
    if not all(bool(((s.abs() > _LEAST) & (s.abs() < _MOST)).all()) for s in (*scales, made)):
        return Miss(MissCode.RANGE, params.scale, "a scale is very large or small", progress=2)
    if zero is not None:
        zero = zero.expand(made.shape)
    return RequantizedFactorSite(chain, block, made, zero, quantizes)


def _is_short(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and dtype.itemsize <= torch.int16.itemsize


def _block(block: Block, factor: torch.Tensor, shape: Sequence[Size]) -> Block | None:
    """Return the block of a scale with the factor, ``None`` if the factor varies in a block."""
    done: list[int | None] = []
    for b, n, size in zip(block, factor.shape, shape, strict=True):
        if n != 1 and b != 1 and not covers(b, size):
            return None
        done.append(b if n == 1 else 1)
    return tuple(done)


def _shifts_exponents(site: RequantizedFactorSite) -> bool:
    """Whether the factors only change exponents of normal float32 numbers."""
    spec = site.dequantize.params.spec
    types = {spec.float_dtype, spec.arithmetic.compute, site.scale.dtype}
    numbers = [step.number for step in site.chain.factors]
    powers = all(bool((n.frexp().mantissa.abs() == _HALF).all()) for n in numbers)
    return types == {torch.float32} and powers and not site.chain.is_clamped


def _looked_up(site: RequantizedFactorSite) -> RequantizedFactorSite | Miss:
    """Look up what becomes of every quantized value; return scales that change none."""
    users: list[_User] = []
    for last in site.quantizes:
        user = _looked_up_user(site, last)
        if isinstance(user, Miss):
            return user
        users.append(user)
    site = replace(site, quantizes=tuple(user.quantize for user in users))
    scale, left = site.scale, torch.ones(site.scale.shape, dtype=torch.bool)
    for steps in _STEPS:
        tried = replace(site, scale=_shifted(site.scale, steps))
        equal = torch.ones_like(left)
        for user in users:
            equal &= user.agrees(tried)
        scale = torch.where(left & equal, tried.scale, scale)
        left &= ~equal
        if not bool(left.any()):
            return replace(site, scale=scale)
    return next(user for user in users if not bool(user.agrees(site).all())).difference(site)


def _looked_up_user(site: RequantizedFactorSite, last: Quantize) -> _User | Miss:
    """Quantize what the source computes for every quantized value."""
    chain = site.chain
    what = "the factor is not a power of two"
    if chain.is_clamped:
        what = "there is a clamp between factors"
    known, source = constant_params(last.params), constant_params(chain.dequantize.params)
    assert source is not None, "it was matched"
    if known is None or last.params.outer_scale is not None:
        text = what + ", and the scale after it is not constant"
        return Miss(MissCode.NOT_CONSTANT, last.node, text, progress=2)
    values = _values(site, known[0])
    if values is None:
        text = what + ", and there are too many scales to look up"
        return Miss(MissCode.GRANULARITY, last.node, text, progress=2)
    real = dequantize(values, *_along(source), _with_values(chain.dequantize.params.spec))
    results = _quantized(chain(real), known, last.params.spec)
    if not chain.is_clamped:
        return _User(last, values, known, results)
    clamped = _to_range(last, results)
    return clamped if isinstance(clamped, Miss) else _User(clamped, values, known, results)


def _to_range(last: Quantize, results: torch.Tensor) -> Quantize | Miss:
    """Quantize to the range of all results."""
    spec = last.params.spec
    offset = spec.domain is ZeroPointDomain.FLOAT_OFFSET
    if spec.dtype.is_floating_point or offset or not spec.is_plain or not results.numel():
        text = "a clamp between factors cannot become a range of {}"
        return Miss(MissCode.DTYPE, last.node, text, spec, progress=2)
    low, high = int(results.min()), int(results.max())
    made = replace(spec, quant_min=low, quant_max=high)
    return replace(last, params=replace(last.params, spec=made))


def _quantized(
    real: torch.Tensor, params: tuple[torch.Tensor, torch.Tensor | None], spec: QuantSpec
) -> torch.Tensor:
    """Quantize float results; return numbers of a type that torch compares."""
    return quantize(real, *_along(params), _with_values(spec)).double()


def _shifted(scale: torch.Tensor, steps: int) -> torch.Tensor:
    """Return the numbers of its type that are some steps above, or below."""
    to = torch.full_like(scale, math.inf if steps > 0 else 0.0)
    for _ in range(abs(steps)):
        scale = torch.nextafter(scale, to)
    return scale


def _values(site: RequantizedFactorSite, scale: torch.Tensor) -> torch.Tensor | None:
    """Return every quantized value, for every element that has parameters of its own."""
    info = torch.iinfo(site.dequantize.params.spec.dtype)
    sizes = [
        1 if n == m == 1 else size
        for n, m, size in zip(
            site.scale.shape, scale.shape, shape_of(site.dequantize.node), strict=True
        )
    ]
    fixed = [size for size in sizes if isinstance(size, int)]
    count = info.max - info.min + 1
    if len(fixed) < len(sizes) or count * math.prod(fixed) > _MOST_VALUES:
        return None
    every = torch.arange(info.min, info.max + 1).to(site.dequantize.params.spec.dtype)
    return every.reshape((count, *(1,) * len(fixed))).expand(count, *fixed)


def _along(
    params: tuple[torch.Tensor, torch.Tensor | None],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return parameters for tensors with an axis more, in front."""
    scale, zero = params
    return scale[None], None if zero is None else zero[None]


def _with_values(spec: QuantSpec) -> QuantSpec:
    """Return the spec of tensors with an axis more, in front."""
    return spec.with_block((None, *spec.block))
