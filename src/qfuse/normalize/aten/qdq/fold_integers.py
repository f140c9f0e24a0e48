"""Store the integers that a graph computes in floats from those of a weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx.node import map_arg

from qfuse.ir.dtypes import BYTES, COMPUTE_DTYPES
from qfuse.ir.graph.schema import overload_of
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.views import dtype_of, has_values, shape_of
from qfuse.ir.quant.spec import dtype_range
from qfuse.normalize.match.constants import derived, evaluated
from qfuse.normalize.match.quantized_values import quantized_values
from qfuse.rewrite.pattern.base import is_tensor
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

_MATRIX = 2


@dataclass(frozen=True, slots=True)
class FoldedIntegers:
    """A float matrix that holds integers, and these."""

    node: Node
    home: Node
    values: torch.Tensor


class FoldIntegers(Rule[FoldedIntegers]):
    """``2 * cast(bits) - 1`` becomes ``cast(q)`` of 8-bit integers that are -1 and 1.

    Before::

        const bits uint8 -> qfuse.dequantize(2) -> sub(1) -> mul(scale)

    After::

        const q int8 -> cast -> mul(scale)

    So does ``where(bits, 1, -1)`` of a constant of bools.

    Exact: the floats are the same integers. A negative zero is none.

    Refuses: fractions, and integers beyond 8 bits; values that are not known; a difference of
    integers and a zero point, which is read as it is.
    """

    name = "fold-integers"
    anchors: ClassVar[tuple[OpOverload, ...]] = (
        aten.sub.Tensor,
        aten.add.Tensor,
        aten.rsub.Scalar,
        aten.where.Scalar,
        aten.where.ScalarSelf,
        aten.where.ScalarOther,
        aten.where.self,
    )
    exactness = Exactness.EXACT

    def match(self, node: Node) -> FoldedIntegers | Miss:
        """Match a float matrix that is computed from integers."""
        if dtype_of(node) not in COMPUTE_DTYPES or len(shape_of(node)) != _MATRIX:
            return Miss(MissCode.DTYPE, node, "it is not a matrix of floats", progress=0)
        homes = [source for source in node.all_input_nodes if _holds_integers(source)]
        if not homes or quantized_values(node) is not None:
            return Miss(MissCode.PATTERN, node, "it shifts no integers of a weight", progress=0)
        value = _computed(node)
        if value is None or not has_values(value) or not value.numel():
            return Miss(MissCode.NO_VALUES, node, "its values are not known", progress=0)
        narrow = _narrow(value)
        if narrow is None:
            return Miss(MissCode.RANGE, node, "it holds no integers of 8 bits", progress=0)
        dequantize = as_dequantize(homes[0])
        return FoldedIntegers(node, homes[0] if dequantize is None else dequantize.q, narrow)

    def rewrite(self, site: FoldedIntegers, rw: Rewriter) -> None:
        """Cast the integers instead."""
        q = derived(rw, site.home, site.values, "integers")
        dtype = dtype_of(site.node)
        rw.replace(site.node, rw.call(aten._to_copy.default, q, dtype=dtype))


def _holds_integers(node: Node) -> bool:
    """Whether ``node`` is a dequantized weight, or a constant matrix of bools."""
    dequantize = as_dequantize(node)
    if dequantize is not None:
        return constant_of(dequantize.q) is not None
    matrix = is_tensor(node) and len(shape_of(node)) == _MATRIX
    return matrix and dtype_of(node) is torch.bool and evaluated(node) is not None


def _computed(node: Node) -> torch.Tensor | None:
    known: dict[Node, torch.Tensor] = {}
    for source in node.all_input_nodes:
        value = _value(source)
        if value is None or not has_values(value):
            return None
        known[source] = value
    op = overload_of(node)
    assert op is not None, "the anchor is a call of an op"
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: known[n])
    with torch.no_grad():
        result = op(*args, **kwargs)
    return result if isinstance(result, torch.Tensor) else None


def _value(node: Node) -> torch.Tensor | None:
    """Return the value of an operand."""
    dequantize = as_dequantize(node)
    if dequantize is None:
        known = constant_value(node)
        return evaluated(node) if known is None else known
    args = dequantize.params.call_args(dequantize.q)
    tensors = [constant_of(a) if isinstance(a, Node) else a for a in args]
    missing = any(isinstance(a, Node) and t is None for a, t in zip(args, tensors, strict=True))
    op = overload_of(node)
    assert op is not None, "a dequantize is a call"
    if missing or any(isinstance(t, torch.Tensor) and not has_values(t) for t in tensors):
        return None
    with torch.no_grad():
        made: torch.Tensor = op(*tensors)
    return made


def _narrow(value: torch.Tensor) -> torch.Tensor | None:
    """Return the integers that ``value`` holds in the first 8-bit dtype that has all of them."""
    whole = value.isfinite() & (value == value.round())
    # Integers have no negative zero.
    if not bool(whole.all()) or bool(((value == 0) & value.signbit()).any()):
        return None
    low, high = float(value.min()), float(value.max())
    for dtype in BYTES:
        least, most = dtype_range(dtype)
        if least <= low and high <= most:
            return value.to(dtype)
    return None
