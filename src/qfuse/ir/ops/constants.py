"""Values that are known at compile time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from qfuse.ir.aten import aten
from qfuse.ir.graph.schema import overload_of
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.view_ops import RESHAPES, TURNS
from qfuse.ir.ops.views import QuantParams

# Ops that importers and users apply to scales and zero points before their use.
_FOLDABLE = frozenset(
    (
        *RESHAPES,
        *TURNS,
        *(
            aten.expand.default,
            aten.slice.Tensor,
            aten.select.int,
            aten.alias.default,
            aten.clone.default,
        ),
        *(aten.detach.default, aten.lift_fresh_copy.default, aten._to_copy.default),
        *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
        *(aten.full.default, aten.zeros.default, aten.ones.default),
        *(aten.scalar_tensor.default, aten.reciprocal.default, aten.neg.default),
        *(aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.sub.Tensor),
        *(aten.arange.default, aten.arange.start, aten.arange.start_step),
        aten.remainder.Scalar,
    )
)
# Indices by which the values of a weight are ordered, and tensors that parts of it are written to.
_COUNTED = frozenset(
    (
        *(aten.arange.default, aten.arange.start, aten.arange.start_step),
        *(aten.scalar_tensor.default, aten.zeros.default, aten.ones.default, aten.full.default),
        aten.empty.memory_format,
    )
)
# Large enough for the parameters of big weights in small groups, too small for weights.
_LIMIT = 1 << 22
# Bounds the recursion, which rules start at every scale and zero point that they look at.
_DEPTH = 12
# Bounds the search of a whole expression, which runs in `match`.
_EXPRESSION = 64


def constant_value(value: object, depth: int = _DEPTH) -> torch.Tensor | None:
    """Return the value of a node that is computed from constants by simple ops, or ``None``.

    The same op computes it as at run time, so the value is identical. Tensors without data (on the
    meta device) do not have a value.
    """
    if not isinstance(value, Node) or depth == 0:
        return None
    if value.op == "get_attr":
        known = constant_of(value)
        return None if known is None or known.is_meta else known
    # The size is checked on the fake value, before anything large is computed.
    if overload_of(value) not in _FOLDABLE or not _is_small(value):
        return None
    inputs: dict[Node, torch.Tensor] = {}
    for node in value.all_input_nodes:
        known = constant_value(node, depth - 1)
        if known is None:
            return None
        inputs[node] = known
    op = overload_of(value)
    assert op is not None, "only calls of ops are foldable"
    args, kwargs = map_arg((value.args, value.kwargs), lambda n: inputs[n])
    with torch.no_grad():
        result = op(*args, **kwargs)
    return result if isinstance(result, torch.Tensor) else None


def operands_first(node: Node) -> Iterator[Node]:
    """Yield what ``node`` depends on, each node once and behind its operands, then ``node``."""
    done: set[Node] = set()
    stack = [node]
    while stack:
        top = stack[-1]
        missing = [n for n in top.all_input_nodes if n not in done]
        if top not in done and missing:
            stack += missing
            continue
        stack.pop()
        if top not in done:
            done.add(top)
            yield top


def is_constant_expression(node: Node) -> bool:
    """Whether ``node`` depends only on constants: a weight, however it is computed.

    Indices that the graph counts itself may take part. The search is bounded; a larger expression
    does not count as a weight.
    """
    seen: set[Node] = set()
    stack, found = [node], False
    while stack:
        top = stack.pop()
        if top in seen:
            continue
        seen.add(top)
        if len(seen) > _EXPRESSION:
            return False
        if top.op == "get_attr":
            if constant_of(top) is None:
                return False
            found = True
        elif top.op == "call_function" and overload_of(top) in _COUNTED and not top.all_input_nodes:
            continue
        elif top.op != "call_function" or not top.all_input_nodes:
            return False
        stack.extend(top.all_input_nodes)
    return found


def number_of(value: object) -> int | float | None:
    """Return a literal number, or the value of a constant of one element."""
    # Python counts `True` as the integer 1.
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return value
    tensor = constant_value(value)
    if tensor is None or tensor.numel() != 1 or tensor.dtype is torch.bool:
        return None
    item: int | float = tensor.item()
    return item


def constant_params(
    params: QuantParams, value: Callable[[Node], torch.Tensor | None] = constant_value
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Return scale and zero point, or ``None`` if ``value`` does not know one of them."""
    scale = value(params.scale)
    zero = None if params.zero_point is None else value(params.zero_point)
    absent = scale is None or (zero is None and params.zero_point is not None)
    return None if scale is None or absent else (scale, zero)


def _is_small(node: Node) -> bool:
    fake = node.meta.get("val")
    return (
        isinstance(fake, torch.Tensor)
        and all(isinstance(size, int) for size in fake.shape)
        and fake.numel() <= _LIMIT
    )
