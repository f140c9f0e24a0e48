"""Conditions on what was captured, each with a code and a sentence for where it does not hold."""

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
        """Ask the predicate."""
        if self.fn(*_values(self.names, bound, node)):
            return {}
        fields = shown({**bound, "node": node})
        return Miss(self.code, _blamed(self.at, bound, node), self.text, fields=fields)

    @property
    def reads(self) -> frozenset[str]:
        """The captures that it needs."""
        told = {name for _, name, _, _ in string.Formatter().parse(self.text) if name}
        told = {name.partition(".")[0].partition("[")[0] for name in told}
        return frozenset((*self.names, *told, *([self.at] if self.at else ())))


@dataclass(frozen=True, slots=True)
class Let:
    """A value that is computed from captures; see :func:`let`."""

    label: str
    fn: Callable[..., object]
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", _parameters(self.fn))

    def test(self, bound: Mapping[str, object], node: Node) -> Miss | Mapping[str, object]:
        """Compute it."""
        found = self.fn(*_values(self.names, bound, node))
        if isinstance(found, Miss) or not self.label:
            return found if isinstance(found, Miss) else {}
        assert self.label not in bound, f"{self.label} is captured already"
        return {self.label: found}

    @property
    def reads(self) -> frozenset[str]:
        """The captures that it needs."""
        return frozenset(self.names)


def where(fn: Callable[..., bool], code: MissCode, text: str, at: str = "") -> Where:
    """Demand that ``fn`` holds.

    Args:
        fn: Its parameters are named after captures, and get them; ``None`` where one is missing.
            ``node`` is the node of the part that is guarded, ``match`` all that was captured.
        code: The code of the miss where it does not hold.
        text: The sentence, a template of captures: ``{x}``, ``{x.shape}``, ``{x.dtype}``.
        at: The capture to blame; the node of the part if it is empty.
    """
    return Where(fn, code, text, at)


def guard(code: MissCode, text: str, at: str = "") -> Callable[[Callable[..., bool]], Where]:
    """Make a guard of a function; see :func:`where`."""
    return lambda fn: Where(fn, code, text, at)


def let(capture: Capture[T], fn: Callable[..., T | Miss]) -> Let:
    """Capture what ``fn`` computes from other captures, unless it is a miss.

    Args:
        capture: What it is captured as.
        fn: As that of :func:`where`.
    """
    return Let(capture.label, fn)


def bind(capture: Capture[T], value: T) -> Let:
    """Capture ``value``: which of several alternatives it is, say."""
    return Let(capture.label, lambda: value)


def check(fn: Callable[..., Miss | None]) -> Let:
    """Demand that ``fn``, as that of :func:`where`, returns no miss."""
    return Let("", fn)


def single_use(*names: str, text: str = "{node} has other users") -> Let:
    """Demand that the nodes that were captured, and what is on a path, have one user each."""

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
    # The typed views of nodes say which node they are of.
    found = value if isinstance(value, Node) else getattr(value, "node", None)
    return found if isinstance(found, Node) else node
