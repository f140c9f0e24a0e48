"""Multiply the scale of a dequantize by a factor, instead of its result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.constants import constant_params, constant_value, number_of
from qfuse.ir.ops.qdq import Dequantize, Quantize, as_dequantize, as_quantize
from qfuse.ir.ops.views import QuantParams, dtype_of, shape_of
from qfuse.ir.quant.block import covers
from qfuse.ir.quant.reference import dequantize, quantize
from qfuse.ir.quant.spec import Block, QuantSpec, ZeroPointDomain
from qfuse.ir.sizes import Size, same_shape
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
    """A multiplied dequantize in front of quantizes.

    Attributes:
        node: The product or quotient.
        dequantize: Its operand.
        block: The block of the scale with the factor.
        scale: The scale with the factor.
        zero_point: The zero point of the same shape, if the dequantize has one.
    """

    node: Node
    dequantize: Dequantize
    block: Block
    scale: torch.Tensor
    zero_point: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _User:
    """A quantize, and what it reads for every quantized value in front of the factor.

    Attributes:
        values: The quantized values, ``[values, *axes]``.
        spec: That of the quantize.
        params: Its scale and zero point.
        real: The float results of the source.
    """

    values: torch.Tensor
    spec: QuantSpec
    params: tuple[torch.Tensor, torch.Tensor | None]
    real: torch.Tensor

    def quantized(self, real: torch.Tensor) -> torch.Tensor:
        """Quantize float results; return numbers of a type that torch compares."""
        return quantize(real, *_along(self.params), _with_values(self.spec)).double()

    def scaled(self, site: RequantizedFactorSite) -> torch.Tensor:
        """Return the results with the factor in the scale."""
        spec = _with_values(site.dequantize.params.spec.with_block(site.block))
        return self.quantized(dequantize(self.values, *_along((site.scale, site.zero_point)), spec))

    def agrees(self, site: RequantizedFactorSite) -> torch.Tensor:
        """Return for every scale whether all results with it are those of the source."""
        equal = (self.scaled(site) == self.quantized(self.real)).all(0)
        for axis, size in enumerate(site.scale.shape):
            # Several elements share a scale: all of them have to agree, or all of several scales.
            if size != equal.shape[axis]:
                equal = equal.all(axis, keepdim=True)
        return equal.expand(site.scale.shape)

    def difference(self, site: RequantizedFactorSite) -> Miss:
        """Say which value would change."""
        old, new = self.quantized(self.real), self.scaled(site)
        place = tuple((old != new).nonzero()[0].tolist())
        text = (
            "the factor is not a power of two: in the scale it would be rounded otherwise, and "
            "the quantized value {:g} would become {:g} instead of {:g}"
        )
        details = [float(each[place]) for each in (self.values, new, old)]
        return Miss(MissCode.ARGUMENT, site.node, text, *details, progress=2)


class FoldRequantizedFactor(Rule[RequantizedFactorSite]):
    """``quantize(dequantize(q, s) * c, t)`` becomes ``quantize(dequantize(q, s * c), t)``.

    Before::

        q -> dequantize(s) -> mul(c) -> quantize(t)

    After::

        q -> dequantize(s * c) -> quantize(t)

    Both are then one requantize. ``c`` is a positive number, or one per channel; a quotient is a
    product with the inverse. A power of two changes the exponent only, so the floats are equal.
    With another factor the products are rounded otherwise. Both forms are computed for every
    quantized value that the type has, and the scale is the one nearest to ``s * c`` with which all
    results are equal.

    Refuses: factors that are not positive; a result that would differ, as for values at a tie;
    scales that are computed at run time (with a power of two, that of the quantize may be); scales
    so large or small that a product leaves the normal range; users other than quantizes.
    """

    name = "fold-requantized-factor"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.mul.Tensor, aten.div.Tensor)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> RequantizedFactorSite | Miss:
        """Match a factor between a dequantize and quantizes."""
        a = arguments(node)
        operand, by = a["self"], a["other"]
        source = as_dequantize(operand)
        if source is None and is_call(node, aten.mul.Tensor):
            source, by = as_dequantize(by), operand
        factor = None if source is None else _factor(by, source)
        if source is None or factor is None:
            return Miss(MissCode.PATTERN, node, "no dequantize is multiplied", progress=0)
        known = _quantizes(node)
        if not known:
            return Miss(MissCode.PATTERN, node, "it is not only quantized", progress=0)
        wrong = factor[~((factor > 0) & factor.isfinite())]
        if len(wrong):
            text = "a factor of {:.6g} is not positive and finite, as scales are"
            return Miss(MissCode.ARGUMENT, node, text, float(wrong[0]), progress=2)
        site = _scaled(node, source, factor)
        if isinstance(site, Miss) or _shifts_exponents(site, factor):
            return site
        return _looked_up(site, by, known)

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
        for last in _quantizes(site.node):
            with rw.instead_of(last.node):
                rw.replace(last.node, rw.call(ops.quantize, *replace(last, x=real).call_args()))


def _quantizes(node: Node) -> list[Quantize]:
    """Return the users of a node, none if some do other than quantize it.

    A quantize may also have it as its scale.
    """
    found = [as_quantize(user) for user in node.users]
    known = [q for q in found if q is not None and q.x is node and node not in q.params.tensors]
    return known if len(known) == len(found) else []


def _factor(by: object, source: Dequantize) -> torch.Tensor | None:
    """Return a constant operand as the op reads it, in the rank of the other, in float64."""
    value = _constant(by)
    rank = source.params.spec.rank
    if value is None:
        return None
    factor = torch.as_tensor(value)
    if factor.dtype is torch.bool or factor.is_complex() or factor.dim() > rank:
        return None
    wide = source.params.spec.float_dtype is torch.float64
    factor = factor.to(torch.float64 if wide else torch.float32).double()
    return factor.reshape((*(1,) * (rank - factor.dim()), *factor.shape))


def _constant(by: object) -> torch.Tensor | int | float | None:
    """Return the value of a constant operand, ``None`` for another one."""
    return constant_value(by) if isinstance(by, Node) else number_of(by)


def _scaled(node: Node, source: Dequantize, factor: torch.Tensor) -> RequantizedFactorSite | Miss:
    """Return the dequantize with the factor in its scale."""
    params, shape = source.params, shape_of(source.node)
    spec, known = params.spec, constant_params(params)
    if known is None:
        text = "the scale is computed at run time"
        return Miss(MissCode.NOT_CONSTANT, params.scale, text, progress=2)
    if (
        not spec.is_plain
        or spec.domain is ZeroPointDomain.FLOAT_OFFSET
        or not _is_short(spec.dtype)
    ):
        return Miss(MissCode.DTYPE, node, "the values are not integers of 16 bits", progress=2)
    if dtype_of(node) != spec.float_dtype or not same_shape(shape_of(node), shape):
        text = "the factor changes the dtype or the shape of the dequantized values"
        return Miss(MissCode.DTYPE, node, text, progress=2)
    block = _block(spec.block, factor, shape)
    if block is None:
        text = "the factor varies within the blocks of {} that share a scale"
        return Miss(MissCode.GRANULARITY, node, text, spec.block_text(), progress=2)
    (scale, zero), wide = known, known[0].double()
    made = (wide / factor if is_call(node, aten.div.Tensor) else wide * factor).to(scale.dtype)
    if not all(bool(((each > _LEAST) & (each < _MOST)).all()) for each in (scale, made)):
        return Miss(MissCode.RANGE, params.scale, "a scale is very large or small", progress=2)
    if zero is not None:
        zero = zero.expand(made.shape)
    return RequantizedFactorSite(node, source, block, made, zero)


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


def _shifts_exponents(site: RequantizedFactorSite, factor: torch.Tensor) -> bool:
    """Whether the factor only changes exponents of normal float32 numbers."""
    spec = site.dequantize.params.spec
    types = {spec.float_dtype, spec.arithmetic.compute, site.scale.dtype}
    return types == {torch.float32} and bool((factor.frexp().mantissa == _HALF).all())


def _looked_up(
    site: RequantizedFactorSite, by: object, quantizes: Sequence[Quantize]
) -> RequantizedFactorSite | Miss:
    """Look up what becomes of every quantized value; return scales that change none."""
    users: list[_User] = []
    for last in quantizes:
        known = constant_params(last.params)
        if known is None or last.params.outer_scale is not None:
            text = "the factor is not a power of two, and the scale after it is not constant"
            return Miss(MissCode.NOT_CONSTANT, last.node, text, progress=2)
        values = _values(site, known[0])
        if values is None:
            text = "the factor is not a power of two, and there are too many scales to look up"
            return Miss(MissCode.GRANULARITY, last.node, text, progress=2)
        users.append(_User(values, last.params.spec, known, _results(site, by, values)))
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
        for n, m, size in zip(site.scale.shape, scale.shape, shape_of(site.node), strict=True)
    ]
    fixed = [size for size in sizes if isinstance(size, int)]
    count = info.max - info.min + 1
    if len(fixed) < len(sizes) or count * math.prod(fixed) > _MOST_VALUES:
        return None
    every = torch.arange(info.min, info.max + 1).to(site.dequantize.params.spec.dtype)
    return every.reshape((count, *(1,) * len(fixed))).expand(count, *fixed)


def _results(site: RequantizedFactorSite, by: object, values: torch.Tensor) -> torch.Tensor:
    """Compute the float results of the source."""
    source, op, factor = site.dequantize.params, overload_of(site.node), _constant(by)
    params = constant_params(source)
    assert op is not None, "a product is a call"
    assert params is not None, "it was matched"
    found: torch.Tensor = op(dequantize(values, *_along(params), _with_values(source.spec)), factor)
    return found


def _along(
    params: tuple[torch.Tensor, torch.Tensor | None],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return parameters for tensors with an axis more, in front."""
    scale, zero = params
    return scale[None], None if zero is None else zero[None]


def _with_values(spec: QuantSpec) -> QuantSpec:
    """Return the spec of tensors with an axis more, in front."""
    return spec.with_block((None, *spec.block))
