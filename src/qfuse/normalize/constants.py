"""Values that are known before the first call, and constants made from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from qfuse.ir.program import constant_of
from qfuse.ir.schema import is_call, overload_of
from qfuse.ir.views import bits_equal

if TYPE_CHECKING:
    from qfuse.rewrite.rewriter import Rewriter

__all__ = [
    "constant_value",
    "derived",
    "evaluated",
    "is_constant_expression",
    "is_unit",
    "number_of",
    "shared_constant",
]

_aten = torch.ops.aten

# What importers and people do to scales and zero points between the parameter and its use.
_FOLDABLE = frozenset(
    (
        *(_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default),
        *(_aten.unsqueeze.default, _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims),
        *(_aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.expand.default),
        *(_aten.slice.Tensor, _aten.select.int, _aten.alias.default, _aten.clone.default),
        *(_aten.detach.default, _aten.lift_fresh_copy.default, _aten._to_copy.default),
        *(_aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default),
        *(_aten.full.default, _aten.zeros.default, _aten.ones.default),
        *(_aten.scalar_tensor.default, _aten.reciprocal.default, _aten.neg.default),
        *(_aten.mul.Tensor, _aten.div.Tensor, _aten.add.Tensor, _aten.sub.Tensor),
    )
)
# Parameters of large weights in small groups fit; weights themselves are never computed with.
_LIMIT = 1 << 22
_DEPTH = 12
_EXPRESSION = 64


def constant_value(value: object, depth: int = _DEPTH) -> torch.Tensor | None:
    """Return the value of a node that is computed from constants by simple ops, or ``None``.

    The same op computes it as would at run time, so nothing is lost by reading it now. Tensors
    without data (on the meta device) have no value.
    """
    if not isinstance(value, Node) or depth == 0:
        return None
    if value.op == "get_attr":
        known = constant_of(value)
        return None if known is None or known.is_meta else known
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


def evaluated(node: Node) -> torch.Tensor | None:
    """Compute a constant expression of any ATen ops and any size, or return ``None``.

    For what would otherwise be computed in every call, such as weights that are unpacked.
    """
    if not is_constant_expression(node):
        return None
    known: dict[Node, torch.Tensor] = {}
    stack = [node]
    while stack:
        top = stack[-1]
        missing = [n for n in top.all_input_nodes if n not in known]
        if missing and top not in known:
            stack.extend(missing)
            continue
        stack.pop()
        if top in known:
            continue
        value = _called(top, known)
        if not isinstance(value, torch.Tensor) or value.is_meta:
            return None
        known[top] = value
    return known[node]


def _called(node: Node, known: dict[Node, torch.Tensor]) -> object:
    """Return the value of a constant, or of a deterministic ATen call of known values."""
    if node.op == "get_attr":
        return constant_of(node)
    op = overload_of(node)
    if op is None or op.namespace != "aten" or torch.Tag.nondeterministic_seeded in op.tags:
        return None
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: known[n])
    with torch.no_grad():
        return op(*args, **kwargs)


def number_of(value: object) -> int | float | None:
    """Return a number that is written in the graph, or the value of a constant of one element."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return value
    tensor = constant_value(value)
    if tensor is None or tensor.numel() != 1 or tensor.dtype is torch.bool:
        return None
    item: int | float = tensor.item()
    return item


def is_unit(scale: Node) -> bool:
    """Whether a scale is 1 by construction: nothing was scaled yet."""
    if is_call(scale, _aten.ones_like.default):
        return True
    value = constant_of(scale)
    return value is not None and not value.is_meta and value.numel() == 1 and value.item() == 1


def is_constant_expression(node: Node) -> bool:
    """Whether ``node`` depends on constants alone: a weight, however it is computed.

    The search is bounded; what is larger is not a weight.
    """
    seen: set[Node] = set()
    stack = [node]
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
        elif top.op != "call_function" or not top.all_input_nodes:
            return False
        stack.extend(top.all_input_nodes)
    return True


def derived(rw: Rewriter, home: Node, value: torch.Tensor, what: str) -> Node:
    """Add a constant that is made from ``home``, once.

    A value equal to ``home`` itself is ``home``; one that was derived before under the same name
    is that one, so parameters that were tied stay tied.

    Args:
        rw: The rewriter.
        home: What the value is made from.
        value: The value.
        what: A word for it, as the end of the constant's name.
    """
    own = constant_of(home)
    if own is not None and _same(own, value):
        return rw.constant(own, str(home.target))
    owner = home.target if home.op == "get_attr" else home.name
    return shared_constant(rw, home, value, f"{owner}_{what}")


def shared_constant(rw: Rewriter, near: Node, value: torch.Tensor, name: str) -> Node:
    """Add a constant under ``name``, or take the equal one that has this name already.

    Args:
        rw: The rewriter.
        near: Any node of the graph.
        value: The value.
        name: The name.
    """
    name = "".join(c if c.isalnum() else "_" for c in name)
    known = getattr(near.graph.owning_module, name, None)
    if isinstance(known, torch.Tensor) and _same(known, value):
        return rw.constant(known, name)
    return rw.constant(value, name)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    if a.is_meta or b.is_meta:
        return a is b
    if a.data_ptr() == b.data_ptr() and a.stride() == b.stride():
        return True
    return a.numel() <= _LIMIT and bits_equal(a, b)


def _is_small(node: Node) -> bool:
    fake = node.meta.get("val")
    return (
        isinstance(fake, torch.Tensor)
        and all(isinstance(size, int) for size in fake.shape)
        and fake.numel() <= _LIMIT
    )
