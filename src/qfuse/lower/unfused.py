"""Reasons why quantize and dequantize ops are left unfused after optimizing."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from qfuse.ir.aten import aten
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import constant_of, op_name
from qfuse.ir.movement.lookup import looked_up_in, looked_up_reason
from qfuse.ir.movement.registry import SPLITS, movement_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.library import output_of
from qfuse.ir.ops.qdq import Dequantize, as_dequantize, as_quantize
from qfuse.ir.ops.views import dtype_of, result_of

# Users beyond this many do not make a reason clearer.
_MOST_USERS = 64

_ATTENTION = (aten.scaled_dot_product_attention.default,)
_LOOKUPS = (aten.embedding.default,)
_BAGS = (
    aten.embedding_bag.default,
    aten.embedding_bag.padding_idx,
    aten._embedding_bag.default,
)
_PRODUCTS = (
    *(aten.bmm.default, aten.matmul.default, aten.mm.default, aten.einsum.default),
    *(aten.linear.default, aten.addmm.default, aten.baddbmm.default),
)
# Such as the shift of unsigned values to signed ones.
_INTEGERS = (
    *(aten._to_copy.default, aten.add.Tensor, aten.sub.Tensor),
    *(aten.clamp.default, aten.bitwise_xor.Scalar),
)


def reason_to_stay(node: Node) -> str:
    """Return the reason why ``node`` was not fused into another op."""
    quantize = as_quantize(node)
    if quantize is not None:
        return _quantize_reason(node, quantize.x, constant_of(quantize.params.scale) is None)
    dequantize = as_dequantize(node)
    if dequantize is not None:
        return _dequantize_reason(node, dequantize)
    return "it changes the parameters between two quantized ops"


def _dequantize_reason(node: Node, dequantize: Dequantize) -> str:
    users = _users(node)
    if constant_of(dequantize.q) is not None:
        return (
            f"{users} uses this weight and has no quantized kernel here: it "
            "computes in float on the dequantized weight"
        )
    if all(user.op == "output" for user in node.users):
        return "its float values are a result of the model"
    if all(is_call(user, *_ATTENTION) for user in node.users):
        return (
            f"{users} computes in float, since it does not quantize the weights that it "
            "multiplies with the values: write matmul, softmax, a quantize and matmul instead"
        )
    table = looked_up_in(node)
    if table is not None and all(_multiplies_floats(user, node) for user in node.users):
        return looked_up_reason(table)
    if is_call(dequantize.q, *_LOOKUPS) and all(is_call(user, *_BAGS) for user in node.users):
        return f"{users} sums these rows in floats; only the rows that it reads are dequantized"
    return f"its float values are used by {users}, which no rule fused with it"


def _multiplies_floats(user: Node, weight: Node) -> bool:
    """Whether an op multiplies ``weight`` by floats, and sums the products."""
    sums = all(is_call(last, aten.sum.dim_IntList) for last in user.users)
    if not is_call(user, *_PRODUCTS) and not (is_call(user, aten.mul.Tensor) and sums):
        return False
    return all(as_dequantize(n) is None for n in user.all_input_nodes if n is not weight)


def is_needed(node: Node) -> bool:
    """Whether quantized ops, or the caller of the model, need the result of ``node``."""
    if as_dequantize(node) is not None:
        return all(user.op == "output" for user in node.users)
    takers = list(_users_below(node))
    return any(user.op == "output" or is_call(user, *ops.FUSED) for user in takers)


def _quantize_reason(node: Node, x: Node, dynamic: bool) -> str:
    takers = sum(is_call(user, *ops.FUSED) for user in _users_below(node))
    feeds = (
        f"it feeds {takers} quantized op{'s' * (takers != 1)}" if takers else "no fused op uses it"
    )
    if x.op == "placeholder":
        return f"it quantizes an input of the model; {feeds}"
    if x.op == "get_attr":
        return f"it quantizes a constant of the model; {feeds}"
    result = result_of(x)
    source = op_name(x if result is None else result[0])
    # A fused op has one block of output arguments, so a second quantize of its result stays.
    if result is not None and output_of(result[0]) is not None:
        return f"{source} already returns a quantized result with other parameters; {feeds}"
    if dynamic:
        return f"its parameters are computed from {source} at run time; {feeds}"
    if is_call(x, *ops.FUSED):
        return f"{source} has other users besides this quantize; {feeds}"
    return f"it is fed by {source}, which has no quantized output here; {feeds}"


def _users_below(node: Node) -> Iterator[Node]:
    """Yield the users of ``node``, looking through movements, splits and arithmetic of integers."""
    stack = [node]
    for _ in range(_MOST_USERS):
        if not stack:
            return
        for user in stack.pop().users:
            moved = movement_of(user) is not None or is_call(user, *SPLITS)
            if moved or (is_call(user, *_INTEGERS) and not dtype_of(user).is_floating_point):
                stack.append(user)
            else:
                yield user


def _users(node: Node) -> str:
    names = list(dict.fromkeys(_name(user) for user in node.users))
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"  # noqa: PLR2004


def _name(user: Node) -> str:
    return "the caller of the model" if user.op == "output" else op_name(user)
