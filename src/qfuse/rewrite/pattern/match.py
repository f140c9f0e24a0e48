"""Match a pattern at a node, and explain a miss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self, TypeVar, cast

from torch.fx import Node

from qfuse.ir.events import Exactness
from qfuse.rewrite.pattern.base import Part
from qfuse.rewrite.pattern.captures import Capture
from qfuse.rewrite.pattern.parts import Pattern
from qfuse.rewrite.pattern.search import Search
from qfuse.rewrite.pattern.writer import Writer
from qfuse.rewrite.rule import Miss, Rule

T = TypeVar("T")

_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Match:
    """The captures of a match.

    Attributes:
        node: The node at which the pattern matched.
        bound: The captures by name.
    """

    node: Node
    bound: Mapping[str, object]

    def __getitem__(self, capture: Capture[T]) -> T:
        return self.bound[capture.label]  # type: ignore[return-value]

    def __contains__(self, capture: Capture[T]) -> bool:
        return capture.label in self.bound

    def get(self, capture: Capture[T]) -> T | None:
        """Return a capture, or ``None`` if its optional part is absent."""
        return self.bound.get(capture.label)  # type: ignore[return-value]


def match(pattern: Pattern, node: Node) -> Match | Miss:
    """Match ``pattern`` at ``node``.

    Returns:
        The first match. Otherwise the miss of the attempt that came furthest, over all alternatives
        and operand orders. Its ``progress`` is the number of parts that had matched there, or 0 if
        the core was not among them.
    """
    search = Search(node, pattern.size, rooted=not pattern.has_core)
    for _ in pattern.walk(node, search, None):
        return Match(node, dict(search.bound))
    return search.verdict()


class PatternRule(Rule[Match]):
    """A rule whose match is a pattern; its anchors are the root ops of the pattern."""

    pattern: ClassVar[Pattern]

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        pattern = cls.__dict__.get("pattern")
        if isinstance(pattern, Pattern):
            # Without known ops at the root the rule would have to be tried at every node.
            assert pattern.heads is not None, f"the pattern of {cls.__name__} starts with no op"
            # A set has no fixed order, and bisection needs the same order in every run.
            cls.anchors = tuple(sorted(pattern.heads, key=str))
            unknown = unbound(pattern)
            assert not unknown, f"the guards of {cls.__name__} read {unknown}, never captured"

    @classmethod
    def row(cls, name: str, exactness: Exactness, pattern: Pattern) -> type[Self]:
        """Return a rule that differs from this one in name, exactness and pattern."""
        fields = {"name": name, "exactness": exactness, "pattern": pattern}
        return cast(type[Self], type(name, (cls,), fields))

    def match(self, node: Node) -> Match | Miss:
        """Match the pattern."""
        return match(self.pattern, node)


def unbound(pattern: Pattern) -> list[str]:
    """Return the names that guards use but no part captures."""
    bound, read = {"node", "match", ""}, set[str]()
    stack: list[Part] = [pattern]
    while stack:
        part = stack.pop()
        bound.add(part.label)
        bound.add(getattr(getattr(part, "path", None), "label", ""))
        for guard in part.guards:
            bound.add(getattr(guard, "label", ""))
            read |= getattr(guard, "reads", frozenset())
        stack += part.children
    return sorted(read - bound)


def explain_miss(miss: Miss) -> str:
    """Return the pattern with a caret at the part that failed, and the reason; two lines."""
    shown = pointed(miss)
    return f"{shown} {miss.reason} (%{miss.at.name})" if shown else miss.reason


def pointed(miss: Miss) -> str:
    """Return the pattern with carets under the part that failed; "" without a pattern."""
    if not miss.trace:
        return ""
    root = miss.trace[0]
    assert isinstance(root, Pattern), "a trace starts at the root of a pattern"
    out = Writer(miss.trace)
    out.part(root)
    start, end = out.found or (0, len(out.text))
    text, start, end = _window(out.text, start, end)
    return f"{text}\n{' ' * start}{'^' * (end - start)}"


def _window(text: str, start: int, end: int) -> tuple[str, int, int]:
    """Truncate a long line around a span."""
    if len(text) <= _WIDTH:
        return text, start, end
    left = max(0, min(start - _WIDTH // 2, len(text) - _WIDTH))
    right = left + _WIDTH
    cut = f"{'...' if left else ''}{text[left:right]}{'...' if right < len(text) else ''}"
    shift = left - (3 if left else 0)
    return cut, start - shift, min(end, right) - shift
