"""Reasons why quantize and dequantize ops are left unfused after optimizing."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from qfuse.ir.aten import aten
from qfuse.ir.dtypes import BYTES, FLOAT8
from qfuse.ir.events import EventLog, Left
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import constant_of, op_name, place_of
from qfuse.ir.movement.lookup import looked_up_in, looked_up_reason
from qfuse.ir.movement.registry import SPLITS, movement_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.convolution import as_fused_convolution
from qfuse.ir.ops.library import output_of
from qfuse.ir.ops.linear import as_fused_linear
from qfuse.ir.ops.matmul import as_fused_matmul
from qfuse.ir.ops.qdq import Dequantize, Quantize, as_dequantize, as_quantize
from qfuse.ir.ops.views import dtype_of, result_of

# Users beyond this many do not make a reason clearer.
_MOST_USERS = 64

_ATTENTION = (aten.scaled_dot_product_attention.default,)
_BAGS = (
    aten.embedding_bag.default,
    aten.embedding_bag.padding_idx,
    aten._embedding_bag.default,
)
# What a cache keeps, once the program is functional.
_WRITES = (
    *(aten.index_copy.default, aten.index_put.default, aten.copy.default),
    *(aten.slice_scatter.default, aten.select_scatter.default, aten.scatter.src),
)
_PRODUCTS = (
    *(aten.bmm.default, aten.matmul.default, aten.mm.default, aten.einsum.default),
    *(aten.linear.default, aten.addmm.default, aten.baddbmm.default),
)
_GIVEN = {"placeholder": "an input", "get_attr": "a constant"}
# Such as the shift of unsigned values to signed ones.
_INTEGERS = (
    *(aten._to_copy.default, aten.add.Tensor, aten.sub.Tensor),
    *(aten.clamp.default, aten.bitwise_xor.Scalar),
)


def log_unfused(node: Node, log: EventLog, stage: str) -> None:
    """Log that ``node`` was left, if it quantizes or dequantizes.

    The reason depends on its producers and users, so this comes before any op is lowered.
    """
    if is_call(node, ops.quantize, ops.dequantize, ops.requantize):
        log.add(Left(stage, place_of(node), reason_to_stay(node), is_needed(node)))


def reason_to_stay(node: Node) -> str:
    """Return the reason why ``node`` was not fused into another op."""
    quantize = as_quantize(node)
    if quantize is not None:
        return _quantize_reason(node, quantize)
    dequantize = as_dequantize(node)
    if dequantize is not None:
        return _dequantize_reason(node, dequantize)
    return "it changes the parameters between two quantized ops"


def _dequantize_reason(node: Node, dequantize: Dequantize) -> str:
    users = _users(node)
    if _is_only_added(node):
        return f"{users} adds or multiplies it in float, behind the sum of its integers"
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
    return _float_reason(node, dequantize, users)


def _float_reason(node: Node, dequantize: Dequantize, users: str) -> str:
    table = looked_up_in(node)
    if table is not None and _is_weight_of_floats(node):
        return looked_up_reason(table)
    if table is not None and all(is_call(user, *_BAGS) for user in node.users):
        return f"{users} sums these rows in floats; only the rows that it reads are dequantized"
    if table is not None:
        return f"{users} computes in float on these rows; only those that it reads are dequantized"
    if _origin(dequantize.q).op == "placeholder":
        return f"{users} computes in float on this quantized input of the model"
    return f"its float values are used by {users}, which no rule fused with it"


def _is_only_added(node: Node) -> bool:
    """Whether only epilogues of products read ``node``, which kernels do in float."""
    return all(_is_extra(node, user) for user in node.users)


def _is_extra(node: Node, user: Node) -> bool:
    fused = as_fused_linear(user) or as_fused_convolution(user) or as_fused_matmul(user)
    if fused is None:
        return False
    others = [n for n in user.all_input_nodes if n not in fused.extras]
    return node in fused.extras and node not in others


def _is_weight_of_floats(node: Node) -> bool:
    return all(_multiplies_floats(user, node) for user in node.users)


def _multiplies_floats(user: Node, weight: Node) -> bool:
    """Whether an op multiplies ``weight`` by floats, and sums the products."""
    sums = all(is_call(last, aten.sum.dim_IntList) for last in user.users)
    if not is_call(user, *_PRODUCTS) and not (is_call(user, aten.mul.Tensor) and sums):
        return False
    others = [n for n in user.all_input_nodes if n is not weight and constant_of(n) is None]
    # Rows of an embedding that a constant multiplies are the activation.
    return bool(others) and all(as_dequantize(n) is None for n in others)


def is_needed(node: Node) -> bool:
    """Whether quantized ops, or the caller of the model, need the result of ``node``.

    So are the floats of what nothing here quantized: rows of a table, and inputs.
    """
    dequantize = as_dequantize(node)
    if dequantize is not None:
        rows = looked_up_in(node) is not None and not _is_weight_of_floats(node)
        given = rows or _origin(dequantize.q).op == "placeholder"
        out = all(user.op == "output" for user in node.users)
        return given or out or _is_only_added(node)
    takers = list(_users_below(node))
    return any(user.op == "output" or is_call(user, *ops.FUSED) for user in takers)


def _quantize_reason(node: Node, quantize: Quantize) -> str:
    takers = list(_users_below(node))
    return f"{_unfused_reason(quantize, takers)}; {_feeds(takers)}"


def _unfused_reason(quantize: Quantize, takers: list[Node]) -> str:
    x, stored = quantize.x, quantize.params.spec.dtype
    read = any(user.op == "output" or is_call(user, *ops.FUSED) for user in takers)
    result = result_of(x)
    source = op_name(x if result is None else result[0])
    if stored not in (*BYTES, *FLOAT8) and not read:
        return f"the activation is stored as {stored}, which no product here reads"
    if x.op in _GIVEN:
        return f"it quantizes {_GIVEN[x.op]} of the model"
    # A fused op has one block of output arguments, so a second quantize of its result stays.
    if result is not None and output_of(result[0]) is not None:
        return f"{source} already returns a quantized result with other parameters"
    if constant_of(quantize.params.scale) is None:
        return f"its parameters are computed from {source} at run time"
    if is_call(x, *ops.FUSED):
        return f"{source} has other users besides this quantize"
    return f"it is fed by {source}, which has no quantized output here"


def _feeds(users: list[Node]) -> str:
    takers = sum(is_call(user, *ops.FUSED) for user in users)
    if takers:
        return f"it feeds {takers} quantized op{'s' * (takers != 1)}"
    if any(user.op == "output" for user in users):
        return "its quantized values are a result or the state of the model"
    return "no fused op uses it"


def _origin(node: Node) -> Node:
    """Return the node whose quantized values the movements above ``node`` move."""
    movement = movement_of(node)
    while movement is not None:
        node = movement.source
        movement = movement_of(node)
    return node


def _users_below(node: Node) -> Iterator[Node]:
    """Yield the users of ``node``.

    Looks through movements, splits, arithmetic of integers, and what a buffer keeps.
    """
    stack = [node]
    for _ in range(_MOST_USERS):
        if not stack:
            return
        for user in stack.pop().users:
            moved = movement_of(user) is not None or is_call(user, *SPLITS, *_WRITES)
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
