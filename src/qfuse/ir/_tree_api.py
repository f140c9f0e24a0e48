"""Nested containers and their structure: the floor's only file on torch's private pytree module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils import _pytree as pytree
from torch.utils._pytree import TreeSpec
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "container_name",
    "difference",
    "flatten",
    "is_subclass",
    "keyword_children",
    "positional_children",
    "unflatten",
]


def flatten(tree: object) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of ``tree`` and its structure."""
    return pytree.tree_flatten(tree)


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


def container_name(spec: TreeSpec) -> str:
    """Describe the outermost container of ``spec`` for people."""
    if spec.is_leaf():
        return "a tensor or constant"
    name = getattr(spec.type, "__name__", str(spec.type))
    if isinstance(spec.context, list) and all(isinstance(key, str) for key in spec.context):
        return f"{name} with keys {spec.context}"
    return f"{name} of {len(spec.children())}"


def difference(name: str, want: TreeSpec, got: TreeSpec) -> tuple[str, str, str]:
    """Return where two structures first differ, and what stands there in each, for people."""
    alike = want.type is got.type and want.context == got.context
    if not alike or len(want.children()) != len(got.children()):
        expected, came = container_name(want), container_name(got)
        if expected == came:
            expected, came = f"{want.context}", f"{got.context}"
        return name, expected, came
    keys = want.context if isinstance(want.context, list) else None
    for index, (left, right) in enumerate(zip(want.children(), got.children(), strict=True)):
        if left != right:
            key = keys[index] if keys is not None and index < len(keys) else index
            return difference(f"{name}[{key!r}]", left, right)
    return name, container_name(want), container_name(got)
