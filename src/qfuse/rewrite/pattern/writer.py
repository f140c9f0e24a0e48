"""Writes a pattern as text and remembers where each part stands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class Shows(Protocol):
    """A part of a pattern."""

    def show(self, out: Writer) -> None:
        """Write the part."""


class Writer:
    """Writes parts, and finds the one that a trace leads to.

    Args:
        trace: The parts from the root to the one that is looked for.

    Attributes:
        text: What was written.
        span: Where the head of that part stands, or the part where it has none.
    """

    def __init__(self, trace: Sequence[object] = ()) -> None:
        self.text = ""
        self.span: tuple[int, int] | None = None
        self._trace = [id(part) for part in trace]
        self._stack: list[int] = []
        self._heads: list[tuple[int, int] | None] = []
        self._spans: dict[int, tuple[int, int]] = {}

    @property
    def is_nested(self) -> bool:
        """Whether the part that is being written stands inside another."""
        return len(self._stack) > 1

    @property
    def found(self) -> tuple[int, int] | None:
        """Where the part stands; where its own place is not written, where it stands first."""
        known = [self._spans[part] for part in reversed(self._trace) if part in self._spans]
        return self.span or (known[0] if known else None)

    def put(self, text: str) -> None:
        """Write plain text."""
        self.text += text

    def head(self, text: str) -> None:
        """Write what a mark of the current part goes under."""
        self._heads[-1] = (len(self.text), len(self.text) + len(text))
        self.put(text)

    def part(self, part: Shows) -> None:
        """Write a part."""
        self._stack.append(id(part))
        self._heads.append(None)
        start = len(self.text)
        part.show(self)
        span = self._heads.pop() or (start, len(self.text))
        self._spans.setdefault(id(part), span)
        if self._stack == self._trace:
            self.span = span
        self._stack.pop()

    def parts(self, parts: Iterable[Shows], between: str = ", ") -> None:
        """Write parts, one after the other."""
        for index, part in enumerate(parts):
            self.put(between if index else "")
            self.part(part)
