"""Why a quantize or dequantize is an op of its own after optimizing, in words for people."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import constant_of, op_name
from qfuse.ir.movement.registry import SPLITS, movement_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.library import output_of
from qfuse.ir.ops.qdq import as_dequantize, as_quantize
from qfuse.ir.ops.views import result_of

# Reasons are sentences for people; what is further away than this is not what they ask about.
_MOST_USERS = 64


def reason_to_stay(node: Node) -> str:
    """Say why ``node`` could not become an edge of a fused op."""
    quantize = as_quantize(node)
    if quantize is not None:
        return _quantize_reason(node, quantize.x, constant_of(quantize.params.scale) is None)
    dequantize = as_dequantize(node)
    if dequantize is not None:
        readers = _users(node)
        if constant_of(dequantize.q) is not None:
            return (
                f"{readers} reads this weight, and has no quantized form here: it is computed from "
                "its stored numbers, in float"
            )
        return f"its real values are read by {readers}, which has no quantized form here"
    return "it changes parameters between two quantized edges"


def _quantize_reason(node: Node, x: Node, dynamic: bool) -> str:
    takers = sum(is_call(user, *ops.FUSED) for user in _users_below(node))
    feeds = (
        f"it feeds {takers} quantized op{'s' * (takers != 1)}"
        if takers
        else "nothing fused reads it"
    )
    if x.op == "placeholder":
        return f"it quantizes an input of the model; {feeds}"
    result = result_of(x)
    source = op_name(x if result is None else result[0])
    if result is not None and output_of(result[0]) is not None:
        return f"{source} gives its result quantized already, with other parameters; {feeds}"
    if dynamic:
        return f"its parameters are computed from {source} at run time; {feeds}"
    if is_call(x, *ops.FUSED):
        return f"{source} has other readers besides this quantize; {feeds}"
    return f"it is fed by {source}, which gives no quantized output here; {feeds}"


def _users_below(node: Node) -> Iterator[Node]:
    """Give the readers of ``node``; instead of movements of its stored numbers, theirs."""
    stack = [node]
    for _ in range(_MOST_USERS):
        if not stack:
            return
        for user in stack.pop().users:
            if movement_of(user) is not None or is_call(user, *SPLITS):
                stack.append(user)
            else:
                yield user


def _users(node: Node) -> str:
    names = list(dict.fromkeys(op_name(user) for user in node.users))
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"  # noqa: PLR2004
