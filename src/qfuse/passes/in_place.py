"""In-place ops on a fresh value without other users: equivalent to their functional forms."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import map_arg

from qfuse.ir.graph.schema import overload_of
from qfuse.ir.sizes import same_shape
from qfuse.passes._torch_api import is_symbolic
from qfuse.rewrite.prelude import Node, OpOverload, aten

# Like elementwise ops, these return new memory.
_FRESH = (
    aten.addmm.default,
    aten.amax.default,
    aten.amin.default,
    aten.bmm.default,
    aten.clone.default,
    aten.mean.dim,
    aten.mm.default,
    aten.sum.dim_IntList,
    aten._to_copy.default,
)


def functional_of(node: Node) -> OpOverload | None:
    """Return the functional op that is equivalent to an in-place op on a fresh value.

    Returns ``None`` for other nodes: the target may have other users, or the functional op differs,
    as when the in-place op keeps a dtype or strides that the functional op does not.
    """
    op = overload_of(node)
    if op is None or op.namespace != "aten" or not op._schema.is_mutable:  # noqa: SLF001
        return None
    target = node.args[0] if node.args else None
    functional = _counterpart(op)
    if functional is None or not isinstance(target, Node) or not _is_fresh(target):
        return None
    # Another user may see the value before or after the write, depending on its place.
    if set(target.users) != {node} or sum(n is target for n in _operands(node)) != 1:
        return None
    return functional if _gives_the_same(functional, node, target) else None


def _operands(node: Node) -> list[Node]:
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found


def _counterpart(op: OpOverload) -> OpOverload | None:
    """Return the elementwise op whose in-place form is ``op``."""
    base = op._schema.name.removeprefix("aten::")  # noqa: SLF001
    if not base.endswith("_"):
        return None
    packet = getattr(aten, base[:-1], None)
    found = getattr(packet, op._overloadname, None)  # noqa: SLF001
    if not isinstance(found, OpOverload) or torch.Tag.pointwise not in found.tags:
        return None
    if torch.Tag.nondeterministic_seeded in found.tags or _formals(found) != _formals(op):
        return None
    return found


def _formals(op: OpOverload) -> list[tuple[str, str, bool]]:
    formals = op._schema.arguments  # noqa: SLF001
    return [(f.name, str(f.real_type), f.kwarg_only) for f in formals]


def _is_fresh(node: Node) -> bool:
    """Whether a node returns newly allocated memory."""
    op = overload_of(node)
    if op is None or op.namespace != "aten":
        return False
    if op._schema.is_mutable:  # noqa: SLF001
        return functional_of(node) is not None
    if any(result.alias_info is not None for result in op._schema.returns):  # noqa: SLF001
        return False
    # Composite ops may return their argument, as dropout does.
    composed = op._can_decompose() if hasattr(op, "_can_decompose") else True  # noqa: SLF001
    return op in _FRESH or (torch.Tag.pointwise in op.tags and not composed)


def _gives_the_same(functional: OpOverload, node: Node, target: Node) -> bool:
    """Whether the functional op keeps dtype, shape and strides, as an in-place write does."""
    if any("val" not in operand.meta for operand in (*_operands(node), target)):
        return False
    values = [operand.meta["val"] for operand in _operands(node)]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    old = target.meta["val"]
    if not isinstance(old, torch.Tensor) or any(t.device != old.device for t in tensors):
        return False
    # Symbolic sizes belong to one fake mode; without any, a graph may have several.
    whole = not any(map(is_symbolic, tensors))
    args, kwargs = map_arg(
        (node.args, node.kwargs), lambda n: _on_meta(n.meta["val"]) if whole else n.meta["val"]
    )
    try:
        with torch.no_grad():
            new = functional(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, AssertionError):
        return False
    # An in-place op keeps the dtype and the strides of its target; the functional op promotes, and
    # chooses strides of its own.
    same = same_shape(new.shape, old.shape) and same_shape(new.stride(), old.stride())
    return same and new.dtype == old.dtype


def _on_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
