"""Match a weight to which a float is added after it is scaled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.dtypes import BYTES
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.constants import constant_params, is_constant_expression
from qfuse.ir.ops.qdq import Dequantize, as_dequantize
from qfuse.ir.ops.views import dtype_of, has_values, shape_of
from qfuse.ir.quant.element import Element
from qfuse.ir.quant.spec import Block, QuantSpec, ZeroPointDomain
from qfuse.ir.sizes import same_shape
from qfuse.normalize.aten.qdq.float_zero_point import offset_of, offset_spec
from qfuse.normalize.match.broadcast import padded
from qfuse.normalize.match.constants import derived, evaluated, parameter_value
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


@dataclass(frozen=True, slots=True)
class OffsetWeight:
    """A dequantized weight and what is added to it.

    Attributes:
        node: The sum.
        dequantize: The dequantize.
        values: The quantized values.
        scale: The scale, with the rank of the weight.
        zero: The zero point, 0 without one.
        offset: What is added, with the rank of the weight.
        block: The elements with one scale and one summand.
    """

    node: Node
    dequantize: Dequantize
    values: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    offset: torch.Tensor
    block: Block


class FloatOffset(Rule[OffsetWeight]):
    """``q * s + z`` with floats ``z`` becomes one ``dequantize`` with an offset.

    Before::

        const q uint8, s -> qfuse.dequantize -> add(const z float)

    After::

        const q uint8, s, middle * s + z -> qfuse.dequantize, domain float_offset

    Such a weight has a minimum per block. ``z`` is a number, or broadcasts over the scale's blocks;
    a difference is alike. ``middle`` is the middle of the range of the values.

    Rounding: ``(q - middle) * s`` is added to the offset instead of ``q * s`` to ``z``.

    Refuses: values, scales or summands that are computed at run time; a summand or scale that is
    infinite or NaN; a summand that has one value per element; scales in two levels.
    """

    name = "float-offset"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.add.Tensor, aten.sub.Tensor)
    exactness = Exactness.ROUNDING

    def match(self, node: Node) -> OffsetWeight | Miss:
        """Match a sum of a dequantized weight and a constant."""
        found = _summands(node)
        if found is None:
            text = "it is not the sum of a dequantized weight and a constant"
            return Miss(MissCode.PATTERN, node, text, progress=0)
        dequantize, offset = found
        wrong = _refuse_spec(node, dequantize.params.spec)
        if wrong is not None:
            return wrong
        params = constant_params(dequantize.params)
        values = constant_of(dequantize.q)
        values = evaluated(dequantize.q) if values is None else values
        if params is None or values is None or not _have_values(values, params[0]):
            return Miss(MissCode.NO_VALUES, node, "its values are not known", progress=0)
        if not bool(offset.isfinite().all() & params[0].isfinite().all()):
            text = "what is added to the weight, or its scale, is infinite or NaN"
            return Miss(MissCode.RANGE, node, text, progress=2)
        spec = dequantize.params.spec
        offset = offset.reshape(padded(tuple(offset.shape), len(spec.block)))
        block = _joint_block(spec.block, tuple(offset.shape))
        if block is None:
            text = "a tensor of shape {} is added to the weight, which is not one number per block"
            return Miss(MissCode.SHAPE, node, text, tuple(offset.shape), progress=2)
        scale, zero = params
        zero = torch.zeros_like(scale) if zero is None else zero
        return OffsetWeight(node, dequantize, values, scale, zero, offset, block)

    def rewrite(self, site: OffsetWeight, rw: Rewriter) -> None:
        """Add the constants and the dequantize."""
        q, old = site.dequantize.q, site.dequantize.params.spec
        spec = offset_spec(site.values, site.block, old.float_dtype, old.arithmetic.compute)
        offset = offset_of(spec, site.scale, site.zero, site.offset.double())
        wide = site.scale.expand(offset.shape).contiguous()
        made = derived(rw, q, wide, "scale"), derived(rw, q, offset, "offset")
        rw.replace(site.node, rw.call(ops.dequantize, q, *made, str(spec)))


def _refuse_spec(node: Node, spec: QuantSpec) -> Miss | None:
    if spec.outer is not None or spec.element is not Element.WHOLE:
        text = "a weight with scales in two levels, or narrow floats, has no offset"
        return Miss(MissCode.GRANULARITY, node, text, progress=2)
    if spec.float_dtype is torch.float64 and spec.arithmetic.compute is not torch.float64:
        text = "the weight is multiplied in {} and the sum is in float64"
        return Miss(MissCode.DTYPE, node, text, spec.arithmetic.compute, progress=2)
    return None


def _have_values(values: torch.Tensor, scale: torch.Tensor) -> bool:
    return has_values(values) and has_values(scale) and values.numel() > 0


def _summands(node: Node) -> tuple[Dequantize, torch.Tensor] | None:
    """Return a dequantized weight and the constant that is added to it."""
    a = arguments(node)
    if a["alpha"] != 1:
        return None
    minus = is_call(node, aten.sub.Tensor)
    sides = [(a["self"], a["other"])]
    if not minus:
        sides.append((a["other"], a["self"]))
    for one, other in sides:
        dequantize = as_dequantize(one)
        if dequantize is None or dtype_of(dequantize.q) not in BYTES:
            continue
        typed = dtype_of(node) == dtype_of(dequantize.node)
        whole = same_shape(shape_of(node), shape_of(dequantize.node))
        value = _number(other)
        ours = dequantize.params.spec.domain in _DOMAINS and is_constant_expression(dequantize.q)
        if typed and whole and ours and value is not None:
            return dequantize, -value if minus else value
    return None


def _number(value: object) -> torch.Tensor | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return torch.tensor(float(value), dtype=torch.float64)
    known = parameter_value(value)
    usable = known is not None and has_values(known) and known.is_floating_point()
    return known if usable else None


def _joint_block(block: Block, grid: tuple[int, ...]) -> Block | None:
    """Return the block with one scale and one summand; ``None`` if it is one element."""
    joint: list[int | None] = []
    for own, count in zip(block, grid, strict=True):
        if count == 1:
            joint.append(own)
        elif own is None or own == 1:
            joint.append(1)
        else:
            return None
    return tuple(joint) if any(b != 1 for b in joint) else None
