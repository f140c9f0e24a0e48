"""Formats a pattern as text and records the position of each part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class Shows(Protocol):
    """A part of a pattern."""

    def show(self, out: Writer) -> None:
        """Write the part."""


class Writer:
    """Writes parts, and locates the one at the end of a trace.

    Args:
        trace: The parts from the root to the one to locate.

    Attributes:
        text: What was written.
        span: The position of that part's head, or of the whole part if it does not have a head.
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
        """Whether the current part is nested in another."""
        return len(self._stack) > 1

    @property
    def found(self) -> tuple[int, int] | None:
        """The position of the part; if that occurrence is not written, of its first one."""
        known = [self._spans[part] for part in reversed(self._trace) if part in self._spans]
        return self.span or (known[0] if known else None)

    def put(self, text: str) -> None:
        """Write plain text."""
        self.text += text

    def head(self, text: str) -> None:
        """Write the head of the current part, which carets mark."""
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
        """Write parts in order, with ``between`` as the separator."""
        for index, part in enumerate(parts):
            self.put(between if index else "")
            self.part(part)
