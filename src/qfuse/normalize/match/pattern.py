"""Patterns of whole expressions: which ops, with which arguments, of what.

For sources that spell one meaning as dozens of ATen ops and always the same ones. An argument that
a pattern does not name must have its default, so nothing goes unseen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops.views import dtype_of
from qfuse.rewrite.prelude import Node, OpOverload, arguments


@dataclass(frozen=True, slots=True)
class Var:
    """Any value; the same one wherever the name stands."""

    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an op.

    Attributes:
        op: The op.
        args: Patterns of its arguments, by their names in the schema.
    """

    op: OpOverload
    args: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Maybe:
    """A call, or its argument ``self`` where the call would do nothing and is not there.

    Attributes:
        call: The call.
        dtype: What the argument then is, where the call is a cast to that.
    """

    call: Call
    dtype: torch.dtype | None = None


ANY = Var("")
"""Any value, another one at every place."""

Pattern: TypeAlias = "Var | Call | Maybe | object"
Found: TypeAlias = dict[str, object]


def find(pattern: Pattern, value: object) -> Found | None:
    """Return what the variables of ``pattern`` stand for in ``value``; ``None`` if it differs."""
    found: Found = {}
    return found if _matches(pattern, value, found) else None


def _matches(pattern: Pattern, value: object, found: Found) -> bool:
    if isinstance(pattern, Var):
        if pattern is ANY:
            return True
        known = found.setdefault(pattern.name, value)
        return known is value or (not isinstance(value, Node) and known == value)
    if isinstance(pattern, Maybe):
        return _may_be_call(pattern, value, found)
    if isinstance(pattern, Call):
        return _is_such_call(pattern, value, found)
    return _same(pattern, value)


def _may_be_call(pattern: Maybe, value: object, found: Found) -> bool:
    tried = dict(found)
    if _matches(pattern.call, value, tried):
        found.update(tried)
        return True
    if pattern.dtype is not None and not (
        isinstance(value, Node) and dtype_of(value) is pattern.dtype
    ):
        return False
    return _matches(pattern.call.args["self"], value, found)


def _is_such_call(pattern: Call, value: object, found: Found) -> bool:
    if not isinstance(value, Node) or not is_call(value, pattern.op):
        return False
    defaults = {a.name: a.default_value for a in pattern.op._schema.arguments}  # noqa: SLF001
    return all(
        _matches(pattern.args[name], given, found)
        if name in pattern.args
        else _same(defaults.get(name), given)
        for name, given in arguments(value).items()
    )


def _same(want: object, given: object) -> bool:
    if isinstance(want, float) and isinstance(given, float) and math.isnan(want):
        return math.isnan(given)
    if isinstance(given, Node) or isinstance(want, bool) != isinstance(given, bool):
        return False
    return list(want) == list(given) if _is_list(want) and _is_list(given) else want == given  # type: ignore[call-overload]


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple))
