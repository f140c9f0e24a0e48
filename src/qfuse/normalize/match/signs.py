"""Values that are known not to be negative, such as scales that are chosen at run time."""

from __future__ import annotations

from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.constants import constant_value, number_of
from qfuse.ir.ops.views import result_of
from qfuse.rewrite.prelude import Node, arguments, aten

# Bounds the walk up from a scale.
_DEPTH = 12
_NEVER = (
    *(aten.abs.default, aten.exp.default, aten.sigmoid.default, aten.sqrt.default),
    *(aten.relu.default, aten.softmax.int, aten._softmax.default),
)
_SAME_SIGN = (
    *(aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim),
    *(aten.expand.default, aten.clone.default, aten.slice.Tensor, aten.select.int),
    *(aten.permute.default, aten.transpose.int, aten.t.default, aten.reciprocal.default),
    *(aten.amax.default, aten.amin.default, aten.max.default, aten.min.default),
    *(aten.mean.default, aten.mean.dim, aten.sum.dim_IntList),
)
_BOTH = (aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.minimum.default)


def is_not_negative(value: object, depth: int = _DEPTH) -> bool:
    """Whether no element of a number or node is below zero, for any data; NaN is left out."""
    number = number_of(value)
    if number is not None or not isinstance(value, Node) or not depth:
        return number is not None and number >= 0
    known = constant_value(value)
    if known is not None:
        return not bool((known < 0).any())
    return _is_result_not_negative(value, depth - 1)


def _is_result_not_negative(node: Node, depth: int) -> bool:
    chosen = result_of(node)
    if chosen is not None:
        is_choice = "choose_qparams" in str(chosen[0].target)
        return chosen[1] == 0 and (is_choice or _of_greatest(chosen[0], depth))
    source = cast_source(node)
    if source is not None or is_call(node, *_SAME_SIGN):
        return is_not_negative(source or arguments(node)["self"], depth)
    if is_call(node, aten.maximum.default, *_BOTH):
        a = arguments(node)
        known = [is_not_negative(a[name], depth) for name in ("self", "other")]
        positive = (number_of(a.get("alpha", 1)) or 0) > 0
        return any(known) if is_call(node, aten.maximum.default) else all(known) and positive
    return is_call(node, *_NEVER) or _is_clamped(node)


def _is_clamped(node: Node) -> bool:
    if not is_call(node, aten.clamp.default, aten.clamp_min.default):
        return False
    a = arguments(node)
    least, most = number_of(a["min"]), number_of(a.get("max"))
    if least is None or least < 0:
        return False
    # Where the bounds cross, the result is the upper one.
    return a.get("max") is None or (most is not None and most >= least)


def _of_greatest(node: Node, depth: int) -> bool:
    return is_call(node, aten.max.dim) and is_not_negative(arguments(node)["self"], depth)
