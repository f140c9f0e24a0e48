"""Quantized values that are scaled at run time, as operands of products of two activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qfuse.ir.dtypes import BYTES, FLOATS
from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.movement.registry import movement_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.matmul import MATMULS, Matmul, as_matmul
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.view_ops import SIZED_VIEWS
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.normalize.aten.qdq.scale_factor import Factor, scale_factor
from qfuse.normalize.match.broadcast import block_of
from qfuse.normalize.match.quantized_values import spec_of_dequantize
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

# Bounds the search above an operand.
_STEPS = 16


@dataclass(frozen=True, slots=True)
class ScaledOperand:
    """A product, one operand of which is scaled at run time.

    Attributes:
        product: The product.
        side: The operand: ``x`` or ``other``.
        path: What moves the scaled values, from the last op to the first.
        node: The multiplication.
        q: The quantized values.
        scale: Their scale.
    """

    product: Matmul
    side: str
    path: tuple[Node, ...]
    node: Node
    q: Node
    scale: Factor


class DequantizeOperand(Rule[ScaledOperand]):
    """``x @ (cast(k) * s)`` becomes ``x @ dequantize(k, s)`` if ``x`` is quantized too.

    Before::

        k int8 -> cast -> mul(s) -> transpose --.
        q -> dequantize ------------------------+-> matmul

    After::

        k, s -> qfuse.dequantize -> transpose --.
        q -> dequantize ------------------------+-> matmul

    This is a KV cache of 8-bit values whose scales are another cache, or are passed in. As nothing
    is known about the sign of these scales, the dequantize is for this product alone.

    Applied when all other quantization has been found.

    Exact: 8-bit values are exact in every float dtype, and a 16-bit dtype rounds the product once,
    as ``qfuse.dequantize`` does.

    Refuses: a scale per element, or one that broadcasts the quantized values to a larger shape;
    another dtype of the scale; a left and right operand of which one is float.
    """

    name = "dequantize-operand"
    anchors: ClassVar[tuple[OpOverload, ...]] = MATMULS
    exactness = Exactness.EXACT

    def match(self, node: Node) -> ScaledOperand | Miss:
        """Match a product of quantized values, of which one are scaled at run time."""
        product = as_matmul(node)
        assert product is not None, "the anchor is a product"
        sides = {"x": product.x, "other": product.other}
        if not all(map(_is_quantized, sides.values())):
            text = "its operands are not two quantized activations"
            return Miss(MissCode.PATTERN, node, text, progress=0)
        for side, operand in sides.items():
            path, base = _path(operand)
            found = _scaled_at_run_time(base)
            if found is None:
                continue
            q, by = found
            if dtype_of(base) not in FLOATS or dtype_of(by) != dtype_of(base):
                text = "the product of quantized values and their scale {} is {}"
                details = dtype_of(by), dtype_of(base)
                return Miss(MissCode.DTYPE, base, text, *details, progress=2)
            scale = scale_factor(base, by, shape_of(q), dtype_of(base))
            if isinstance(scale, Miss):
                return scale
            return ScaledOperand(product, side, path, base, q, scale)
        return Miss(MissCode.PATTERN, node, "no operand is scaled at run time", progress=0)

    def rewrite(self, site: ScaledOperand, rw: Rewriter) -> None:
        """Dequantize the values for this product, and move them as before."""
        q, scale, product = site.q, site.scale, site.product
        block = block_of(shape_of(q), scale.shape)
        assert block is not None, "the scale tiles the quantized values"
        spec = spec_of_dequantize(q, shape_of(q), scale.shape, dtype_of(site.node), block)
        value = rw.call(ops.dequantize, q, scale.build(rw), None, str(spec))
        for node in reversed(site.path):
            op = overload_of(node)
            assert op is not None, "a movement is a call"
            op = aten.reshape.default if op in SIZED_VIEWS else op
            value = rw.call(op, value, *node.args[1:], **node.kwargs)
        operands = [value, product.other] if site.side == "x" else [product.x, value]
        op = overload_of(product.node)
        assert op is not None, "a product is a call"
        rw.replace(product.node, rw.call(op, *operands))


def _path(operand: Node) -> tuple[tuple[Node, ...], Node]:
    """Return the movements above an operand, and what they move."""
    path: list[Node] = []
    while len(path) < _STEPS and (movement := movement_of(operand)) is not None:
        # A part of a split does not take the tensor that it moves.
        if overload_of(operand) is None:
            break
        path.append(operand)
        operand = movement.source
    return tuple(path), operand


def _scaled_at_run_time(node: Node) -> tuple[Node, Node] | None:
    """View ``node`` as a product of 8-bit values that are cast, and a tensor; else ``None``."""
    if not is_call(node, aten.mul.Tensor):
        return None
    a = arguments(node)
    for value, by in ((a["self"], a["other"]), (a["other"], a["self"])):
        q = cast_source(value)
        known = not isinstance(by, Node) or constant_value(by) is not None
        if q is None or dtype_of(q) not in BYTES or constant_of(q) is not None or known:
            continue
        assert isinstance(by, Node), "a number is known"
        return q, by
    return None


def _is_quantized(operand: Node) -> bool:
    """Whether an operand is a dequantize of an activation, scaled by whatever and moved."""
    for _ in range(_STEPS):
        _, operand = _path(operand)
        if _scaled_at_run_time(operand) is not None:
            return True
        found = as_dequantize(operand)
        if found is not None:
            return constant_of(found.q) is None
        # A constant factor is folded into the product later.
        if not is_call(operand, aten.mul.Tensor, aten.div.Tensor):
            return False
        a = arguments(operand)
        given = [v for v in (a["self"], a["other"]) if isinstance(v, Node)]
        varying = [v for v in given if constant_value(v) is None]
        if len(varying) != 1:
            return False
        operand = varying[0]
    return False
