"""Multiply the scale of a dequantize by a power of two, instead of its result."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.constants import number_of
from qfuse.ir.ops.qdq import Dequantize, as_dequantize
from qfuse.ir.ops.views import dtype_of
from qfuse.ir.quant.spec import ZeroPointDomain
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


@dataclass(frozen=True, slots=True)
class RequantizedFactorSite:
    """A multiplied dequantize in front of quantizes.

    Attributes:
        node: The product or quotient.
        dequantize: Its operand.
        factor: What the result is multiplied by.
    """

    node: Node
    dequantize: Dequantize
    factor: float


class FoldRequantizedFactor(Rule[RequantizedFactorSite]):
    """``quantize(dequantize(q, s) * 0.5, t)`` becomes ``quantize(dequantize(q, 0.5 * s), t)``.

    Before::

        q -> dequantize(s) -> mul(0.5) -> quantize(t)

    After::

        q -> dequantize(0.5 * s) -> quantize(t)

    Both are then one requantize. A power of two changes the exponent only, so the floats are equal.

    Refuses: another factor, with which the product of both scales is rounded otherwise, so that
    values at a tie may be one step off; a scale that is computed at run time, or so large or small
    that a product leaves the normal range; another dtype than float32; users other than quantizes.
    """

    name = "fold-requantized-factor"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.mul.Tensor, aten.div.Tensor)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> RequantizedFactorSite | Miss:
        """Match a factor between a dequantize and quantizes."""
        a = arguments(node)
        operand, by = a["self"], a["other"]
        dequantize, number = as_dequantize(operand), number_of(by)
        if dequantize is None and is_call(node, aten.mul.Tensor):
            dequantize, number = as_dequantize(by), number_of(operand)
        if dequantize is None or number is None:
            return Miss(MissCode.PATTERN, node, "no dequantize is multiplied", progress=0)
        if not node.users or not all(is_call(user, ops.quantize) for user in node.users):
            return Miss(MissCode.PATTERN, node, "it is not only quantized", progress=0)
        power = number > 0 and math.isfinite(number) and math.frexp(number)[0] == _HALF
        if not power:
            text = (
                "the factor {} between a dequantize and a quantize is not a power of two: with it "
                "in the scale, values at a tie may be one step off"
            )
            return Miss(MissCode.ARGUMENT, node, text, number, progress=2)
        factor = 1 / number if is_call(node, aten.div.Tensor) else float(number)
        wrong = _refuse_scale(node, dequantize, factor)
        return wrong or RequantizedFactorSite(node, dequantize, factor)

    def rewrite(self, site: RequantizedFactorSite, rw: Rewriter) -> None:
        """Dequantize with the other scale."""
        params = site.dequantize.params
        scale = constant_of(params.scale)
        assert scale is not None, "it was matched"
        made = rw.constant(scale * site.factor, f"{params.scale.name}_scaled")
        fused = replace(site.dequantize, params=replace(params, scale=made))
        rw.replace(site.node, rw.call(ops.dequantize, *fused.call_args()))


def _refuse_scale(node: Node, dequantize: Dequantize, factor: float) -> Miss | None:
    params = dequantize.params
    scale, spec = constant_of(params.scale), params.spec
    if scale is None or scale.is_meta:
        text = "the scale is computed at run time"
        return Miss(MissCode.NOT_CONSTANT, params.scale, text, progress=2)
    wide = {dtype_of(node), spec.float_dtype, spec.arithmetic.compute, scale.dtype}
    if wide != {torch.float32} or params.outer_scale is not None or not spec.is_plain:
        text = "the floats between a dequantize and a quantize are not only float32"
        return Miss(MissCode.DTYPE, node, text, progress=2)
    if spec.domain is ZeroPointDomain.FLOAT_OFFSET or spec.dtype.itemsize > torch.int16.itemsize:
        return Miss(MissCode.DTYPE, node, "the values are not integers of 16 bits", progress=2)
    both = torch.stack((scale, scale * factor))
    if not bool(((both > _LEAST) & (both < _MOST)).all()):
        return Miss(MissCode.RANGE, params.scale, "a scale is very large or small", progress=2)
    return None
