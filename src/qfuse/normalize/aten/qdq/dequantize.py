"""Match a cast, a subtraction and a multiplication as ``dequantize``."""

from __future__ import annotations

import torch
from torch.fx.node import Argument

from qfuse.ir.dtypes import COMPUTE_DTYPES
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.qdq import as_quantize
from qfuse.ir.ops.views import dtype_of, has_values, shape_of
from qfuse.normalize.aten.qdq.scale_factor import (
    Factor,
    chosen_at_run_time,
    exact_zero_factor,
    scale_factor,
)
from qfuse.normalize.match.broadcast import block_of
from qfuse.normalize.match.constants import parameter_value
from qfuse.normalize.match.lookup import lookup_of
from qfuse.normalize.match.quantized_values import (
    QUANTIZED,
    QUANTIZED_TO_16_BITS,
    QuantizedValues,
    integers_of,
    spec_of_dequantize,
)
from qfuse.normalize.match.views import view_source
from qfuse.rewrite.pattern import Capture, Either, Match, Operand, PatternRule, guard, let
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, Rewriter

SCALE = Operand("scale")
VALUE = Capture[Node]("value")
SCALE_FACTOR = Capture[Factor]("scale_factor")
ZERO_FACTOR = Capture[Factor | None]("zero_factor")


def _is_parameter(q: Node, param: Node) -> bool:
    """Whether ``param`` was chosen at run time, or is a parameter of the quantize of ``q``.

    So is the constant whose rows are looked up by the indices by which the rows of ``q`` are.
    """
    rows, scales = lookup_of(q), lookup_of(param)
    if rows is not None and scales is not None and rows.by == scales.by:
        return _is_positive(scales.table)
    made = as_quantize(_unviewed(q))
    root, params = _unviewed(param), () if made is None else made.params.tensors
    # A zero point in floats is cast for the quantize.
    roots = [_unviewed(p) for p in params]
    roots += [_unviewed(source) for source in map(cast_source, roots) if source is not None]
    return chosen_at_run_time(param) or root in roots


def _is_positive(scale: Node) -> bool:
    """Whether a table holds scales, or integers."""
    value = constant_of(scale)
    if value is None or not has_values(value):
        return False
    if not dtype_of(scale).is_floating_point:
        return True
    return bool((value.isfinite() & (value >= 0)).all())


def _unviewed(node: Node) -> Node:
    while (source := view_source(node)) is not None:
        node = source
    return node


@guard(MissCode.NOT_CONSTANT, "the factor is not known to be a scale", at="scale")
def _is_scale(q: Node, scale: Argument) -> bool:
    # `q * x` with an activation `x` has the same form, and is no dequantize.
    known = not isinstance(scale, Node) or parameter_value(scale) is not None
    return known or (isinstance(scale, Node) and _is_parameter(q, scale))


def _scale_factor(node: Node, value: Node, scale: Argument) -> Factor | Miss:
    compute = torch.float64 if dtype_of(node) is torch.float64 else torch.float32
    return scale_factor(node, scale, shape_of(value), compute, signed=True)


@guard(MissCode.ZERO_POINT, "{q.dtype} values have no zero point")
def _may_be_shifted(q: Node, zero: Argument) -> bool:
    return zero is None or not dtype_of(q).is_floating_point


@guard(
    MissCode.NOT_CONSTANT,
    "the zero point is not a constant, and no op that chooses zero points returned it: "
    "quantize symmetrically, or call such an op",
    at="zero",
)
def _is_zero_point(q: Node, zero: Argument) -> bool:
    if not isinstance(zero, Node) or constant_value(zero) is not None:
        return True
    integers = integers_of(zero)
    return integers is not None and _is_parameter(q, integers)


def _zero_factor(node: Node, q: Node, zero: Argument, scale_factor: Factor) -> Factor | Miss | None:
    return exact_zero_factor(node, q, zero, scale_factor)


_VALUES = Either(QUANTIZED, QUANTIZED_TO_16_BITS).named("value")


class DequantizeChain(PatternRule):
    """``(cast(q) - zero_point) * scale`` becomes one ``qfuse.dequantize``.

    Before::

        q -> cast -> sub(zero_point) -> mul(scale)

    After::

        q, scale, zero_point -> qfuse.dequantize

    Exact: 8-bit values and their differences are exact in every float dtype, and a 16-bit dtype
    rounds the float32 product once, as ``qfuse.dequantize`` does. Values that were quantized to 16
    bits are exact in float32 and wider.

    Refuses: a scale that is neither a constant, nor chosen by a dynamic quantization, nor the scale
    of the quantize of ``q``, nor looked up with the rows of ``q``, since then it is only a factor;
    a scale per element, or one that broadcasts the quantized values to a larger shape; a zero point
    that is not an integer of the values' range, or has other blocks than the scale; constants of
    16 bits.
    """

    name = "dequantize-chain"
    exactness = Exactness.EXACT
    pattern = (
        (_VALUES * SCALE.given(_is_scale).core())
        .giving(*COMPUTE_DTYPES)
        .given(let(SCALE_FACTOR, _scale_factor), _may_be_shifted, _is_zero_point)
        .given(let(ZERO_FACTOR, _zero_factor))
    )

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Build the parameters, then the dequantize."""
        stored, scale, zero = QuantizedValues.of(site), site[SCALE_FACTOR], site[ZERO_FACTOR]
        shape = shape_of(site[VALUE])
        block = block_of(shape, scale.shape)
        assert block is not None, "the scale tiles the quantized values"
        spec = spec_of_dequantize(stored.q, shape, scale.shape, dtype_of(site.node), block)
        q = stored.build(rw)
        made = None if zero is None else zero.build(rw)
        rw.replace(site.node, rw.call(ops.dequantize, q, scale.build(rw), made, str(spec)))
