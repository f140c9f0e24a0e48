"""A dequantize whose float offset is added by ``addcmul``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.dtypes import COMPUTE_DTYPES
from qfuse.ir.ops.constants import constant_value, is_constant_expression
from qfuse.ir.ops.views import dtype_of, has_values, node_of, shape_of
from qfuse.ir.sizes import same_shape
from qfuse.normalize.match.constants import derived
from qfuse.normalize.match.quantized_values import quantized_values
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


@dataclass(frozen=True, slots=True)
class SummedWeight:
    """``offset + weight * scale``.

    Attributes:
        node: The op.
        weight: The quantized values as floats.
        scale: The scale, a constant, and its value with the factor of the op.
        offset: What is added.
    """

    node: Node
    weight: Node
    scale: tuple[Node, torch.Tensor]
    offset: tuple[Node, torch.Tensor]


class SpellAddcmul(Rule[SummedWeight]):
    """``addcmul(z, cast(q), s, value=v)`` becomes ``cast(q) * (v * s) + z``.

    Before::

        const q -> cast -> addcmul(const z, const s)

    After::

        const q -> cast -> mul(const s) -> add(const z)

    The product is then a dequantize, and the sum its offset. In 16 bits, ``addcmul`` rounds once,
    so product and sum are computed in float32.

    Rounding: ``v`` is multiplied with the scale instead of the weight, and a machine may round
    product and sum at once.

    Refuses: factors and summands that are computed at run time, or are not floats; a summand that
    broadcasts the weight to a larger shape. The sum of other values is left as it is.
    """

    name = "spell-addcmul"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.addcmul.default,)
    exactness = Exactness.ROUNDING

    def match(self, node: Node) -> SummedWeight | Miss:
        """Match a sum with a product of quantized values and a constant."""
        a = arguments(node)
        pair = node_of(a["tensor1"]), node_of(a["tensor2"])
        for weight, scale in (pair, pair[::-1]):
            stored = quantized_values(weight)
            if stored is not None and is_constant_expression(stored.q):
                return _summed(node, weight, scale, node_of(a["self"]), a["value"])
        return Miss(MissCode.PATTERN, node, "it multiplies no quantized weight", progress=0)

    def rewrite(self, site: SummedWeight, rw: Rewriter) -> None:
        """Multiply, then add."""
        real = dtype_of(site.node)
        compute = torch.float64 if real is torch.float64 else torch.float32
        weight, (by, scale), (summand, offset) = site.weight, site.scale, site.offset
        if dtype_of(weight) != compute:
            weight = rw.call(aten._to_copy.default, weight, dtype=compute)
        y = rw.call(aten.mul.Tensor, weight, derived(rw, by, scale.to(compute), "scaled"))
        y = rw.call(aten.add.Tensor, y, derived(rw, summand, offset.to(compute), "added"))
        if real != compute:
            y = rw.call(aten._to_copy.default, y, dtype=real)
        rw.replace(site.node, y)


def _summed(
    node: Node, weight: Node, by: Node, summand: Node, value: object
) -> SummedWeight | Miss:
    scale, offset = constant_value(by), constant_value(summand)
    for part, known in ((by, scale), (summand, offset)):
        if known is None or not has_values(known):
            text = "{}, with which a weight is dequantized, is not a constant with known values"
            return Miss(MissCode.NOT_CONSTANT, part, text, part.name, progress=2)
        if dtype_of(part) not in COMPUTE_DTYPES:
            text = "{} is {}, and the weight is a float"
            return Miss(MissCode.DTYPE, part, text, part.name, dtype_of(part), progress=2)
    assert scale is not None, "it is known"
    assert offset is not None, "it is known"
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return Miss(MissCode.ARGUMENT, node, "its value is not a number", progress=2)
    if not same_shape(shape_of(node), shape_of(weight)):
        text = "the sum has the shape {}, and the weight {}"
        shapes = tuple(shape_of(node)), tuple(shape_of(weight))
        return Miss(MissCode.SHAPE, node, text, *shapes, progress=2)
    return SummedWeight(node, weight, (by, scale.double() * value), (summand, offset))
