"""Ops between the parts of a pattern that a match looks through: casts, views, transposes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch._ops import OpOverload
from torch.fx import Node

from qfuse.ir.aten import aten
from qfuse.ir.events import MissCode
from qfuse.ir.ops.casts import cast_source
from qfuse.rewrite.pattern.base import Part, is_tensor
from qfuse.rewrite.pattern.captures import Capture
from qfuse.rewrite.pattern.parts import Pattern
from qfuse.rewrite.pattern.search import Frame, Mismatch, Search
from qfuse.rewrite.pattern.writer import Writer

# Bounds the walk from every operand; each shorter path is tried again in backtracking.
_LONGEST = 12


@dataclass(frozen=True, slots=True)
class Step:
    """A kind of op that a pattern looks through.

    Attributes:
        name: The name for messages.
        source: Returns the operand of such an op, ``None`` for any other value.
        ops: The ops that may be of this kind.
    """

    name: str
    source: Callable[[Node], Node | None]
    ops: tuple[OpOverload, ...] = ()


CAST = Step("cast", cast_source, (aten._to_copy.default,))
"""A copy that changes only the dtype."""


@dataclass(frozen=True, slots=True)
class Path:
    """The steps between an operand and the value that a pattern matches.

    Attributes:
        base: The matched value.
        steps: The steps with their kinds, from ``base`` outward.
    """

    base: Node
    steps: tuple[tuple[Step, Node], ...] = ()

    @property
    def top(self) -> Node:
        """The operand."""
        return self.steps[-1][1] if self.steps else self.base

    @property
    def nodes(self) -> tuple[Node, ...]:
        """``base`` and the steps, outward."""
        return (self.base, *(node for _, node in self.steps))

    @property
    def shared(self) -> Node | None:
        """The first node, from ``base`` outward, with several users."""
        return next((node for node in self.nodes if len(node.users) > 1), None)

    def of(self, *kinds: Step) -> tuple[Node, ...]:
        """Return the steps of some kinds, outward."""
        return tuple(node for kind, node in self.steps if kind in kinds)


class Through(Pattern):
    """A part behind any number of steps; the longest path is tried first.

    Args:
        inner: The part.
        kinds: The kinds of steps.
        path: Captures the steps.
    """

    weight = 0

    def __init__(
        self, inner: Pattern, kinds: Sequence[Step], path: Capture[Path] | None = None
    ) -> None:
        self.inner = inner
        self.kinds = tuple(kinds)
        self.path = path

    @property
    def children(self) -> Sequence[Part]:
        """The part."""
        return (self.inner,)

    def read(self, value: object) -> object | Mismatch:
        """Accept anything, since zero steps also match."""
        return value

    def parts(self, value: object, search: Search, frame: Frame) -> Iterator[None]:
        """Match behind all steps, then behind successively fewer."""
        walked = [] if not isinstance(value, Node) else self._steps(value)
        # The longest path first, so that a part that accepts anything does not stop at a cast.
        for count in range(len(walked), -1, -1):
            base = walked[count - 1][2] if count else value
            steps = tuple((kind, node) for kind, node, _ in reversed(walked[:count]))
            # Steps count as progress: a miss behind three casts came further than one in front of
            # them.
            search.enter(count, core=False)
            yield from self._behind(base, steps, search, frame)
            search.leave(count, core=False)

    def _behind(
        self, base: object, steps: tuple[tuple[Step, Node], ...], search: Search, frame: Frame
    ) -> Iterator[None]:
        if self.path is None or not isinstance(base, Node):
            yield from self.inner.walk(base, search, frame)
            return
        name = self.path.label
        assert name not in search.bound, f"two paths are captured as {name}"
        search.bound[name] = Path(base, steps)
        yield from self.inner.walk(base, search, frame)
        del search.bound[name]

    def _steps(self, value: Node) -> list[tuple[Step, Node, Node]]:
        found: list[tuple[Step, Node, Node]] = []
        while len(found) < _LONGEST and is_tensor(value):
            sources = ((kind, kind.source(value)) for kind in self.kinds)
            kind, source = next(((k, s) for k, s in sources if s is not None), (None, None))
            if kind is None or source is None:
                break
            found.append((kind, value, source))
            value = source
        return found

    def show(self, out: Writer) -> None:
        """Write the part, with dots for the steps."""
        out.head("..")
        out.part(self.inner)


class Via(Pattern):
    """A part behind one step.

    Args:
        inner: The part.
        kind: The kind of the step.
    """

    def __init__(self, inner: Pattern, kind: Step) -> None:
        self.inner = inner
        self.kind = kind

    @property
    def children(self) -> Sequence[Part]:
        """The part."""
        return (self.inner,)

    @cached_property
    def heads(self) -> frozenset[OpOverload] | None:
        """The ops of that kind."""
        return frozenset(self.kind.ops) if self.kind.ops else None

    def read(self, value: object) -> object | Mismatch:
        """Accept a step of this kind."""
        if is_tensor(value) and self.kind.source(value) is not None:
            return value
        fields = {"wanted": self.kind.name}
        return Mismatch(MissCode.PATTERN, "expected a {wanted}, found {found}", fields)

    def parts(self, value: object, search: Search, frame: Frame) -> Iterator[None]:
        """Match the operand of the step."""
        assert isinstance(value, Node), "read says so"
        yield from self.inner.walk(self.kind.source(value), search, frame)

    def show(self, out: Writer) -> None:
        """Write the step as a call."""
        out.head(self.kind.name)
        out.put("(")
        out.part(self.inner)
        out.put("".join(f", {str(d).removeprefix('torch.')}" for d in self.dtypes[:1]) + ")")


def cast(inner: Pattern, *dtypes: torch.dtype) -> Pattern:
    """Return the pattern of a cast to one of ``dtypes``, or to any type."""
    return Via(inner, CAST).giving(*dtypes)


def through(inner: Pattern, *kinds: Step, path: Capture[Path] | None = None) -> Pattern:
    """Return the pattern of ``inner`` behind any number of steps, which ``path`` captures."""
    return Through(inner, kinds, path)
