"""Conditions on captures, each with the code and the message of its miss."""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.rewrite.pattern.captures import Capture
from qfuse.rewrite.pattern.match import Match
from qfuse.rewrite.pattern.search import shown
from qfuse.rewrite.pattern.through import Path
from qfuse.rewrite.rule import Miss

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Where:
    """A predicate; see :func:`where`."""

    fn: Callable[..., bool]
    code: MissCode
    text: str
    at: str
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", _parameters(self.fn))

    def test(self, bound: Mapping[str, object], node: Node) -> Miss | Mapping[str, object]:
        """Test the predicate."""
        if self.fn(*_values(self.names, bound, node)):
            return {}
        fields = shown({**bound, "node": node})
        return Miss(self.code, _blamed(self.at, bound, node), self.text, fields=fields)

    @property
    def reads(self) -> frozenset[str]:
        """The captures that the guard uses."""
        details = {name for _, name, _, _ in string.Formatter().parse(self.text) if name}
        details = {name.partition(".")[0].partition("[")[0] for name in details}
        return frozenset((*self.names, *details, *([self.at] if self.at else ())))


@dataclass(frozen=True, slots=True)
class Let:
    """A value computed from captures; see :func:`let`."""

    label: str
    fn: Callable[..., object]
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", _parameters(self.fn))

    def test(self, bound: Mapping[str, object], node: Node) -> Miss | Mapping[str, object]:
        """Compute and bind the value."""
        found = self.fn(*_values(self.names, bound, node))
        if isinstance(found, Miss) or not self.label:
            return found if isinstance(found, Miss) else {}
        assert self.label not in bound, f"{self.label} is captured already"
        return {self.label: found}

    @property
    def reads(self) -> frozenset[str]:
        """The captures that the guard uses."""
        return frozenset(self.names)


def where(fn: Callable[..., bool], code: MissCode, text: str, at: str = "") -> Where:
    """Require that ``fn`` holds.

    Args:
        fn: Its parameters are named after captures and receive them; ``None`` if one is unbound.
            ``node`` is the node of the guarded part, ``match`` holds all captures.
        code: The code of the miss if it does not hold.
        text: The message, a template over captures: ``{x}``, ``{x.shape}``, ``{x.dtype}``.
        at: The capture at which the miss is reported; empty for the node of the part.
    """
    return Where(fn, code, text, at)


def guard(code: MissCode, text: str, at: str = "") -> Callable[[Callable[..., bool]], Where]:
    """Decorator form of :func:`where`."""
    return lambda fn: Where(fn, code, text, at)


def let(capture: Capture[T], fn: Callable[..., T | Miss]) -> Let:
    """Capture what ``fn`` computes from other captures; a miss that it returns fails the match.

    Args:
        capture: The capture to bind.
        fn: As for :func:`where`.
    """
    return Let(capture.label, fn)


def bind(capture: Capture[T], value: T) -> Let:
    """Capture the constant ``value``, for example to tell alternatives apart."""
    return Let(capture.label, lambda: value)


def check(fn: Callable[..., Miss | None]) -> Let:
    """Require that ``fn``, as for :func:`where`, does not return a miss."""
    return Let("", fn)


def single_use(*names: str, text: str = "{node} has other users") -> Let:
    """Require that each captured node, and each node on a captured path, has one user."""

    def shared(match: Match) -> Miss | None:
        for name in names:
            for each in _nodes(match.bound.get(name)):
                if len(each.users) > 1:
                    fields = shown({**match.bound, "node": each})
                    return Miss(MissCode.SHARED, each, text, fields=fields)
        return None

    return Let("", shared)


def _parameters(fn: Callable[..., object]) -> tuple[str, ...]:
    return tuple(inspect.signature(fn).parameters)


def _values(names: tuple[str, ...], bound: Mapping[str, object], node: Node) -> list[object]:
    known = {**bound, "node": node, "match": Match(node, bound)}
    return [known.get(name) for name in names]


def _nodes(value: object) -> tuple[Node, ...]:
    if isinstance(value, Path):
        return value.nodes
    return (value,) if isinstance(value, Node) else ()


def _blamed(name: str, bound: Mapping[str, object], node: Node) -> Node:
    value = bound.get(name)
    if isinstance(value, Path):
        return value.base
    # A typed view has its node as an attribute.
    found = value if isinstance(value, Node) else getattr(value, "node", None)
    return found if isinstance(found, Node) else node
