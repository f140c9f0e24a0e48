"""Trees, kinds of tensors and modes: the core's only module with torch's private API of them."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import TreeSpec

from qfuse.ir.errors import USER_CODE_ERRORS

_TRACING = tuple(torch._C._TorchDispatchModeKey.__members__.values())


def structure(tree: object) -> TreeSpec:
    """Return the structure of ``tree``."""
    return pytree.tree_structure(tree)


def tree_leaves(tree: object) -> list[Any]:
    """Return the leaves of ``tree``, in the order of its structure."""
    return list(pytree.tree_leaves(tree))


def flatten_like(spec: TreeSpec, tree: object) -> list[Any]:
    """Return the leaves of ``tree`` in the order of ``spec``; dictionaries may be in any order.

    Raises:
        ValueError: ``tree`` has a different structure.
    """
    return spec.flatten_up_to(tree)


def unflatten(leaves: Sequence[Any], spec: TreeSpec) -> Any:
    """Return the tree of structure ``spec`` with ``leaves``."""
    return pytree.tree_unflatten(leaves, spec)


def positional_children(in_spec: TreeSpec) -> list[TreeSpec]:
    """Return the structure of each positional argument of a tree of ``(args, kwargs)``."""
    return list(in_spec.child(0).children())


def keyword_children(in_spec: TreeSpec) -> dict[str, TreeSpec]:
    """Return the structure of each keyword argument of a tree of ``(args, kwargs)``."""
    keywords = in_spec.child(1)
    return dict(zip(keywords.context or (), keywords.children(), strict=True))


def is_subclass(value: object) -> bool:
    """Return whether ``value`` is a tensor that wraps others, such as a quantized one."""
    return is_traceable_wrapper_subclass(value)


def is_fake_tensor(value: object) -> bool:
    """Return whether a tensor has a shape and no values."""
    return isinstance(value, FakeTensor)


def tracing() -> str:
    """Return what traces or transforms the calls of this thread; "" if nothing does.

    Compiled code reads the memory of its inputs, which tensors have none of under these.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func"
    # Modes that count or log are not among these.
    if torch._C._len_torch_dispatch_stack():
        modes = map(torch._C._get_dispatch_mode, _TRACING)
        return next((type(mode).__name__ for mode in modes if mode is not None), "")
    return ""


def leaf_spec() -> TreeSpec:
    """Return the structure of a leaf."""
    return pytree.tree_structure(0)


def node_spec(kind: type, context: Any, children: Sequence[TreeSpec]) -> TreeSpec:
    """Return the structure of a container that is not a named tuple.

    Args:
        kind: Its class, which is registered with torch.
        context: What the class stores besides its children.
        children: The structures of its children.
    """
    return TreeSpec(kind, context, list(children))


def named_tuple_of(spec: TreeSpec) -> Any:
    """Return the class of a named tuple; ``None`` for another container."""
    return spec.context if spec.type is namedtuple else None  # noqa: PYI024 - torch's name of them


def named_tuple_spec(kind: type, children: Sequence[TreeSpec]) -> TreeSpec:
    """Return the structure of a named tuple of the class ``kind``."""
    return TreeSpec(namedtuple, kind, list(children))  # noqa: PYI024


def is_registered(kind: type) -> bool:
    """Return whether torch flattens ``kind``; named tuples are flattened by their base class."""
    return kind in pytree.SUPPORTED_NODES


def flat_leaves(tree: object) -> list[Any]:
    """Return the leaves of ``tree``."""
    return pytree.tree_leaves(tree)


def named_leaves(tree: object) -> list[tuple[str, Any]]:
    """Return the leaves of ``tree``, each with its path, such as ``.logits`` or ``[0]['key']``."""
    paths, _ = pytree.tree_flatten_with_path(tree)
    return [(pytree.keystr(path), leaf) for path, leaf in paths]


def child_names(spec: TreeSpec) -> list[str] | None:
    """Return the attributes that hold the children of a container; ``None`` if it has no such."""
    plain = TreeSpec(spec.type, spec.context, [leaf_spec() for _ in range(spec.num_children)])
    try:
        paths, _ = pytree.tree_flatten_with_path(unflatten([0] * spec.num_children, plain))
    # The functions that flatten the class are those of another package.
    except USER_CODE_ERRORS:
        return None
    keys = [path[0] if len(path) == 1 else None for path, _ in paths]
    names = [str(getattr(key, "name", getattr(key, "key", ""))) for key in keys]
    fit = len(names) == spec.num_children and all(name.isidentifier() for name in names)
    return names if fit else None


def difference(name: str, want: TreeSpec, got: TreeSpec) -> tuple[str, str, str]:
    """Describe where two structures first differ, and each one's container there."""
    if want.is_leaf() or got.is_leaf() or want.type is not got.type:
        return name, _container(want), _container(got)
    left, right = _keyed(want), _keyed(got)
    if left.keys() != right.keys():
        return name, _container(want), _container(got)
    for key, child in left.items():
        if child != right[key]:
            return difference(f"{name}[{key!r}]", child, right[key])
    return name, f"{want.context}", f"{got.context}"


def _keyed(spec: TreeSpec) -> dict[Any, TreeSpec]:
    keys = spec.context if issubclass(spec.type, dict) else None
    return dict(zip(keys or range(spec.num_children), spec.children(), strict=False))


def _container(spec: TreeSpec) -> str:
    """Describe the outermost container for a message."""
    if spec.is_leaf():
        return "a tensor or a constant"
    name = str(getattr(spec.type, "__name__", spec.type))
    if issubclass(spec.type, dict):
        return f"{name} with keys {list(_keyed(spec))}"
    return f"{name} of {spec.num_children}" if spec.type in {list, tuple} else name
