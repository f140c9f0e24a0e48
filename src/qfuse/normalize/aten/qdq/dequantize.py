"""A dequantize written as arithmetic: a cast, a subtraction, a multiplication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx.node import Argument

from qfuse.ir.dtypes import REALS
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import as_quantize
from qfuse.ir.ops.value_range import bounds_of
from qfuse.ir.ops.views import dtype_of, node_of, shape_of
from qfuse.ir.quant.spec import QuantSpec, dtype_name, dtype_range
from qfuse.normalize.aten.qdq.scale_factor import (
    Factor,
    chosen_at_run_time,
    scale_factor,
    zero_factor,
)
from qfuse.normalize.importers.rule import RefusedError
from qfuse.normalize.match.quantized_values import Stored, stored_numbers, stored_spec
from qfuse.normalize.match.views import view_source
from qfuse.rewrite.prelude import (
    Exactness,
    Miss,
    MissCode,
    Node,
    OpOverload,
    Rewriter,
    Rule,
    arguments,
)


@dataclass(frozen=True, slots=True)
class DequantizeSite:
    """The product that ends a chain, and what it multiplies."""

    node: Node
    stored: Stored
    scale: Factor
    zero: Factor | None
    spec: QuantSpec


class DequantizeChain(Rule[DequantizeSite]):
    """``(cast(q) - zero_point) * scale`` becomes one ``qfuse.dequantize``.

    Before::

        q -> cast -> sub(zero_point) -> mul(scale)

    After::

        q, scale, zero_point -> qfuse.dequantize

    Exact: 8-bit numbers and their differences are exact in every float type, and a 16-bit type
    rounds the float32 product once, as ``qfuse.dequantize`` does.

    Refuses: a scale that is neither a constant nor chosen by a dynamic quantization, nor that of
    the quantize that made ``q``, since then it is just a factor; a scale per element, or one that
    broadcasts the stored numbers to a larger shape; a zero point that is no 8-bit integer, or has
    other blocks than the scale.
    """

    name = "dequantize-chain"
    anchors: ClassVar[tuple[OpOverload, ...]] = (torch.ops.aten.mul.Tensor,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> DequantizeSite | Miss:
        """Match a product of stored numbers and a scale, in either order."""
        a = arguments(node)
        for value, scale in ((a["self"], a["other"]), (a["other"], a["self"])):
            stored = stored_numbers(value)
            if stored is None or dtype_of(node) not in REALS:
                continue
            try:
                return _read(node, node_of(value), stored, scale)
            except RefusedError as refused:
                if refused.miss.code is MissCode.NOT_CONSTANT:
                    # Numbers of 8 bits that are multiplied, such as a mask, need no reason.
                    refused.miss.progress = 0
                return refused.miss
        return Miss(MissCode.PATTERN, node, "no factor is stored numbers", progress=0)

    def rewrite(self, site: DequantizeSite, rw: Rewriter) -> None:
        """Build the parameters, then the dequantize."""
        q = site.stored.build(rw)
        zero = None if site.zero is None else site.zero.build(rw)
        scale = site.scale.build(rw)
        rw.replace(site.node, rw.call(ops.dequantize, q, scale, zero, str(site.spec)))


def _read(node: Node, value: Node, stored: Stored, by: Argument) -> DequantizeSite:
    shape, dtype = shape_of(value), dtype_of(stored.q)
    real = dtype_of(node)
    compute = torch.float64 if real is torch.float64 else torch.float32

    def is_parameter(found: Node) -> bool:
        return chosen_at_run_time(found) or _made_with(stored.q, found)

    scale, block = scale_factor(node, by, shape, compute, is_parameter)
    zero = None
    if stored.zero is not None:
        if dtype.is_floating_point:
            text = "{} stored numbers have no zero point"
            raise RefusedError(MissCode.ZERO_POINT, node, text, dtype_name(dtype))
        zero = zero_factor(node, stored.zero, scale.shape, dtype, is_parameter)
        _check_zero(node, zero, dtype, real)
    spec = stored_spec(stored.q, shape, scale.shape, real, block)
    return DequantizeSite(node, stored, scale, zero, spec)


def _check_zero(node: Node, zero: Factor | None, dtype: torch.dtype, real: torch.dtype) -> None:
    """Check a zero point that is computed at run time: other differences are rounded to 16 bits.

    Raises:
        RefusedError: It may be out of the range of the stored numbers.
    """
    if zero is None or zero.value is not None or real in {torch.float32, torch.float64}:
        return
    (low, high), bounds = dtype_range(dtype), bounds_of(zero.home)
    if bounds is None or bounds[0] < low or bounds[1] > high:
        text = "the zero point is not known to lie in [{}, {}], the range of {}"
        raise RefusedError(MissCode.ZERO_POINT, node, text, low, high, dtype_name(dtype))


def _made_with(q: Node, param: Node) -> bool:
    """Whether ``q`` is the result of a quantize with ``param``, both in whatever shape."""
    made = as_quantize(_unviewed(q))
    if made is None:
        return False
    root = _unviewed(param)
    params = (made.params.scale, made.params.zero_point)
    return any(p is not None and _unviewed(p) is root for p in params)


def _unviewed(node: Node) -> Node:
    while (source := view_source(node)) is not None:
        node = source
    return node
