"""Multiply the scales of a weight by those of a second level."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.constants import constant_params, is_constant_expression
from qfuse.ir.ops.qdq import Dequantize, as_dequantize
from qfuse.ir.ops.views import dtype_of, has_values, shape_of
from qfuse.ir.quant.element import Element
from qfuse.ir.quant.spec import Block, ZeroPointDomain
from qfuse.ir.sizes import same_shape
from qfuse.normalize.match.broadcast import padded
from qfuse.normalize.match.constants import derived, parameter_value
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

_DOMAINS = (ZeroPointDomain.NONE, ZeroPointDomain.INT)
_LIMITS = torch.finfo(torch.float32)


@dataclass(frozen=True, slots=True)
class SecondScaleSite:
    """A dequantized weight with a factor.

    Attributes:
        node: The product.
        dequantize: The dequantize.
        scale: The product of both scales, one per block.
        zero: The zero points, one per block; ``None`` without any.
        block: The elements with one scale.
    """

    node: Node
    dequantize: Dequantize
    scale: torch.Tensor
    zero: torch.Tensor | None
    block: Block


class FoldSecondScale(Rule[SecondScaleSite]):
    """``dequantize(w, s) * t`` with constants becomes ``dequantize(w, s * t)``.

    Before::

        const w, s -> qfuse.dequantize -> mul(const t)

    After::

        const w, s * t -> qfuse.dequantize

    A weight with scales in two levels: one per group, and one per channel or for all groups. ``t``
    is a number, or has one number per block of ``s`` or for several of them. ``neg`` has the factor
    -1.

    Rounding: the scales are multiplied first.

    Refuses: values or factors that are computed at run time; factors that are zero or not finite;
    a factor per element, or one whose blocks do not join with those of the scale; scales that would
    leave the range of float32; other dtypes than float32.
    """

    name = "fold-second-scale"
    anchors: ClassVar[tuple[OpOverload, ...]] = (
        aten.mul.Tensor,
        aten.div.Tensor,
        aten.neg.default,
    )
    exactness = Exactness.ROUNDING

    def match(self, node: Node) -> SecondScaleSite | Miss:
        """Match a product of a dequantized weight and a constant."""
        a = arguments(node)
        sides = [(a["self"], a.get("other", -1))]
        if is_call(node, aten.mul.Tensor):
            sides.append((a["other"], a["self"]))
        for one, other in sides:
            dequantize = as_dequantize(one)
            if dequantize is not None and is_constant_expression(dequantize.q):
                return _second(node, dequantize, other)
        return Miss(MissCode.PATTERN, node, "no factor is a dequantized weight", progress=0)

    def rewrite(self, site: SecondScaleSite, rw: Rewriter) -> None:
        """Dequantize with the product of the scales."""
        old = site.dequantize
        scale = derived(rw, old.params.scale, site.scale, "twice")
        zero = old.params.zero_point
        if zero is not None and site.zero is not None:
            zero = derived(rw, zero, site.zero, "wide")
        spec = old.params.spec.with_block(site.block)
        params = replace(old.params, scale=scale, zero_point=zero, spec=spec)
        rw.replace(site.node, rw.call(ops.dequantize, *params.call_args(old.q)))


def _second(node: Node, dequantize: Dequantize, other: object) -> SecondScaleSite | Miss:
    spec, shape = dequantize.params.spec, shape_of(dequantize.node)
    plain = spec.outer is None and spec.element is Element.WHOLE and spec.domain in _DOMAINS
    types = {dtype_of(node), dtype_of(dequantize.node), dtype_of(dequantize.params.scale)}
    if types != {torch.float32} or not plain or not same_shape(shape_of(node), shape):
        return Miss(MissCode.DTYPE, node, "it is no float32 weight with one scale", progress=0)
    number = float(other) if isinstance(other, (int, float)) else None
    known = parameter_value(other) if number is None else torch.tensor(number).double()
    params = constant_params(dequantize.params)
    if known is None or params is None or not has_values(known) or not has_values(params[0]):
        return Miss(MissCode.NOT_CONSTANT, node, "the factor is not a constant", progress=0)
    factor = known.double().reshape(padded(tuple(known.shape), len(shape)))
    if not bool((factor.isfinite() & (factor != 0)).all()):
        text = "the factors of a weight are not all finite and nonzero"
        return Miss(MissCode.RANGE, node, text, progress=2)
    scale, zero = params
    block = _joint(spec.block, tuple(scale.shape), tuple(factor.shape))
    if block is None:
        text = "a factor of shape {} on a weight with scales of shape {} is not one per block"
        details = tuple(factor.shape), tuple(scale.shape)
        return Miss(MissCode.GRANULARITY, node, text, *details, progress=2)
    made = (scale / factor if is_call(node, aten.div.Tensor) else scale * factor).float()
    size = made.abs()[(scale != 0).expand(made.shape)]
    if size.numel() and not (size.min() >= _LIMITS.tiny and size.max() <= _LIMITS.max):
        text = "a product of both scales leaves the range of float32"
        return Miss(MissCode.RANGE, node, text, progress=2)
    wide = None if zero is None else zero.expand(made.shape).contiguous()
    return SecondScaleSite(node, dequantize, made.contiguous(), wide, block)


def _joint(block: Block, scales: tuple[int, ...], factors: tuple[int, ...]) -> Block | None:
    """Return the block of the product of scales and factors; ``None`` if it is one element."""
    joint: list[int | None] = []
    for own, count, other in zip(block, scales, factors, strict=True):
        if other in {1, count}:
            joint.append(own)
        elif own is None:
            joint.append(1)
        else:
            return None
    return tuple(joint) if any(size != 1 for size in joint) else None
