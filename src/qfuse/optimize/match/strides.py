"""Whether a value may get other strides, and replacing it together with its views."""

from __future__ import annotations

import operator

import torch

from qfuse.ir.graph.alias import leaves_graph
from qfuse.ir.graph.schema import arguments, is_call, overload_of
from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.movement.registry import SPLITS, movement_of
from qfuse.ir.ops.views import node_of, tensor_of
from qfuse.ir.sizes import same_strides
from qfuse.optimize.match.move_qparams import GraphMover, reads_any_strides
from qfuse.rewrite.prelude import Miss, MissCode, Node, Rewriter, aten


def refuse_layout(node: Node, moved: torch.Tensor, *, moves: bool = True) -> Miss | None:
    """Refuse to replace ``node`` by a value with the strides of ``moved``.

    Args:
        node: Quantized values.
        moved: The value that replaces them.
        moves: Whether that may be a view of another tensor.
    """
    old = tensor_of(node)
    same = same_strides(moved, old)
    # As a view of another tensor, it would change when the caller writes to that tensor.
    if leaves_graph(node) and (moves or not same):
        text = "its quantized values leave the graph, as a tensor of their own"
        return Miss(MissCode.SHARED, node, text, progress=3)
    if same:
        return None
    # Quantized ops accept any strides; only the order of these decides the strides of the result.
    alike = same_strides(torch.empty_like(moved), torch.empty_like(old))
    joined = [user for user in node.users if is_call(user, aten.cat.default)]
    alike = alike and reads_any_strides(node, aten.cat.default)
    if alike and all(_joins_alike(user, node, moved) for user in joined):
        return None
    return _other_strides(node)


def _joins_alike(cat: Node, node: Node, moved: torch.Tensor) -> bool:
    """Whether a cat has the same strides with ``moved`` in place of ``node``."""
    # A cat of channels-last images is channels-last, any other is row-major.
    a = arguments(cat)
    tensors = a["tensors"]
    assert isinstance(tensors, (list, tuple)), "a cat joins a list"
    values = [moved if part is node else tensor_of(node_of(part)) for part in tensors]
    with torch.no_grad():
        made = aten.cat.default(values, a["dim"])
    return same_strides(made, tensor_of(cat))


def refuse_sunk(node: Node, moved: torch.Tensor, *, parts: bool = False) -> Miss | None:
    """Refuse to replace ``node`` by the dequantized form of ``moved``.

    Args:
        node: The float tensor.
        moved: The quantized values, of the shape of ``node``.
        parts: ``node`` is a part of a tensor in the order of its axes. The new value has that order
            too, without gaps, so it allows the same views.
    """
    with torch.no_grad():
        # Dequantize is elementwise: its result is dense, in the order of axes of its operand.
        same = same_strides(torch.empty_like(moved), tensor_of(node))
    if same or (parts and not leaves_graph(node)) or _is_copied(node):
        return None
    return _other_strides(node)


def _is_copied(node: Node) -> bool:
    """Whether all users copy ``node`` in row-major order, whatever its strides."""
    return bool(node.users) and all(
        is_call(user, aten.clone.default)
        and arguments(user)["memory_format"] is torch.contiguous_format
        for user in node.users
    )


def _other_strides(node: Node) -> Miss:
    text = "its strides would change, and {} may depend on them"
    return Miss(MissCode.SHAPE, node, text, ", ".join(map(op_name, node.users)), progress=3)


def restride(old: Node, new: Node, rw: Rewriter) -> None:
    """Replace ``old`` by ``new``, which may have other strides, and its views by views of ``new``.

    A view that the new strides do not allow becomes a ``reshape``, which copies; a split is
    repeated, and so are the views of its parts. Other ops accept
    strided operands as they are.

    Args:
        old: The value to replace.
        new: The same values.
        rw: Edits the graph.
    """
    stack = [(old, new)]
    while stack:
        before, after = stack.pop()
        users = list(before.users)
        rw.replace(before, after)
        for user in users:
            if not _shows(user, after):
                continue
            parts = _parts(user)
            stack += [(user, _again(user, after, rw))] if parts is None else _split(user, parts, rw)


def stride_sensitive_user(node: Node) -> Node | None:
    """Return a view of ``node`` that cannot be rebuilt on other strides.

    It depends on memory and not on elements, as ``as_strided`` does.
    """
    stack = [node]
    while stack:
        source = stack.pop()
        for user in source.users:
            if not _shows(user, source):
                continue
            parts = _parts(user)
            if parts is None and movement_of(user) is None:
                return user
            stack += [user] if parts is None else parts
    return None


def _parts(user: Node) -> list[Node] | None:
    """Return the parts of a split, ``None`` for another op."""
    if overload_of(user) not in SPLITS:
        return None
    parts = list(user.users)
    return parts if all(part.target is operator.getitem for part in parts) else None


def _shows(user: Node, source: Node) -> bool:
    """Whether ``user`` is a view of ``source``."""
    op = overload_of(user)
    views = (aten._unsafe_view.default, aten.reshape.default)
    if op is None or not (op.is_view or is_call(user, *views)):
        return False
    return user.all_input_nodes[0] is source


def _split(user: Node, parts: list[Node], rw: Rewriter) -> list[tuple[Node, Node]]:
    """Repeat a split whose operand was replaced; return each part with its new value."""
    op = overload_of(user)
    assert op is not None, "it is a split"
    with rw.before(user):
        split = rw.call(op, *user.args, **user.kwargs)
    made = []
    for part in parts:
        index = part.args[1]
        assert isinstance(index, int), f"not a part: {part.format_node()}"
        with rw.before(part):
            made.append((part, rw.item(split, index)))
    return made


def _again(user: Node, source: Node, rw: Rewriter) -> Node:
    movement = movement_of(user)
    assert movement is not None, "a value with a stride-sensitive user keeps its strides"
    with rw.before(user):
        made: Node = movement.apply(GraphMover(rw), source)
    return made
