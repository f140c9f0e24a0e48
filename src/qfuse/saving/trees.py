"""Nested containers of a call and of its result as JSON.

Named tuples, dataclasses and other classes that are registered with torch are saved by name. A file
does not import anything: a class of a module that is not imported when the file is loaded is
replaced by a named tuple with the same attributes.
"""

from __future__ import annotations

import builtins
import re
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qfuse.ir.errors import ModelFileError
from qfuse.ir.signature._tree_api import (
    child_names,
    is_registered,
    leaf_spec,
    named_tuple_of,
    named_tuple_spec,
    node_spec,
)
from qfuse.saving.codec import UnknownValueError, class_name, find_class, from_data, to_data

if TYPE_CHECKING:
    from torch.utils._pytree import TreeSpec

_MAPPINGS: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict, "defaultdict": defaultdict}
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "list": list, "deque": deque}


def tree_to_data(spec: TreeSpec) -> Any:
    """Return a structure as what JSON can hold; a leaf is ``"*"``.

    Raises:
        ModelFileError: The key of a dictionary cannot be saved.
    """
    if spec.is_leaf():
        return "*"
    children = [tree_to_data(child) for child in spec.children()]
    for name, kind in _SEQUENCES.items():
        if spec.type is kind:
            return {"kind": name, "context": spec.context, "children": children}
    for name, kind in _MAPPINGS.items():
        if spec.type is kind:
            return {"kind": name, "context": _keys(spec, name), "children": children}
    cls = named_tuple_of(spec)
    if cls is not None:
        fields = list(cls._fields)
        return {
            "kind": "namedtuple",
            "class": class_name(cls),
            "fields": fields,
            "children": children,
        }
    data: dict[str, Any] = {"kind": "class", "class": class_name(spec.type), "children": children}
    data |= {"fields": child_names(spec), "none": _absent(spec)}
    # Without a context the class is replaced always.
    with suppress(UnknownValueError):
        data["context"] = to_data(spec.context)
    return data


def _keys(spec: TreeSpec, name: str) -> Any:
    keys = spec.context
    try:
        if name != "defaultdict":
            return to_data(list(keys))
        factory, keys = keys
        known = getattr(builtins, getattr(factory, "__name__", ""), None) is factory
        return [factory.__name__ if factory is not None and known else None, to_data(list(keys))]
    except UnknownValueError as error:
        raise ModelFileError(
            f"a key of a dictionary among the model's inputs or results is {error}",
            fix="use strings or numbers as keys",
        ) from error


def _absent(spec: TreeSpec) -> list[str]:
    """Return the fields of a dataclass that were ``None``, which its structure leaves out."""
    context = spec.context
    if isinstance(context, (list, tuple)) and len(context) > 1 and isinstance(context[1], list):
        return [name for name in context[1] if isinstance(name, str) and name.isidentifier()]
    return []


@dataclass(slots=True)
class TreeReader:
    """Makes structures of data, and notes the classes that were replaced.

    Attributes:
        replaced: The classes, as ``module:name``.
    """

    replaced: list[str] = field(default_factory=list)

    def read(self, data: Any) -> TreeSpec:
        """Return the structure of :func:`tree_to_data`."""
        if data == "*":
            return leaf_spec()
        children = [self.read(child) for child in data["children"]]
        kind = data["kind"]
        if kind in _SEQUENCES:
            context = data["context"] if kind == "deque" else None
            return node_spec(_SEQUENCES[kind], context, children)
        if kind in _MAPPINGS:
            return node_spec(_MAPPINGS[kind], _context(kind, data["context"]), children)
        if kind == "namedtuple":
            return self._named_tuple(data, children)
        if kind != "class":
            raise ValueError(f"a container {kind!r}")
        return self._registered(data, children)

    def _named_tuple(self, data: Any, children: list[TreeSpec]) -> TreeSpec:
        found = find_class(data["class"])
        fields = list(data["fields"])
        if found is None or list(getattr(found, "_fields", ())) != fields:
            self.replaced.append(data["class"])
            found = _record(data["class"], fields, ())
        return named_tuple_spec(found, children)

    def _registered(self, data: Any, children: list[TreeSpec]) -> TreeSpec:
        found = find_class(data["class"])
        if found is not None and is_registered(found) and "context" in data:
            # A class in the context may not be imported.
            with suppress(UnknownValueError):
                return node_spec(found, from_data(data["context"]), children)
        self.replaced.append(data["class"])
        names = data["fields"]
        if names is None:
            return node_spec(tuple, None, children)
        return named_tuple_spec(_record(data["class"], names, data["none"]), children)


def _context(kind: str, data: Any) -> Any:
    if kind != "defaultdict":
        return from_data(data)
    factory = None if data[0] is None else getattr(builtins, data[0])
    if factory not in {None, bool, dict, float, int, list, set, str, tuple}:
        raise ValueError(f"a defaultdict of {data[0]}")
    return [factory, from_data(data[1])]


def _record(name: str, fields: Iterable[str], none: Iterable[str]) -> Any:
    """Return a named tuple class; ``none`` are fields at its end that are ``None``."""
    title = re.sub(r"\W", "_", name.rpartition(":")[2].rpartition(".")[2])
    absent = list(none)
    names = [*fields, *absent]
    return namedtuple(title, names, rename=True, defaults=[None] * len(absent))  # noqa: PYI024
