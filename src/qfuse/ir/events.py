"""What happened, as data. One list of events feeds the table, the JSON and the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar


class Exactness(StrEnum):
    """How far a rewrite may change values (see ``rewrite/tolerance.py``).

    ``ASSUMED`` is exact if parameters that have no values are the same wherever they look alike.
    It exists on graphs of meta tensors alone, and only where somebody asked for it.
    """

    EXACT = "exact"
    ROUNDING = "rounding"
    LOSSY = "lossy"
    ASSUMED = "assumed"


class MissCode(StrEnum):
    """Why a rule did not fire, for machines. The sentence beside it is for people."""

    NOT_QUANTIZED = "not-quantized"
    GRANULARITY = "granularity"
    AXIS = "axis"
    RANGE = "range"
    ZERO_POINT = "zero-point"
    DTYPE = "dtype"
    ARITHMETIC = "arithmetic"
    ARGUMENT = "argument"
    NOT_CONSTANT = "not-constant"
    NO_VALUES = "no-values"
    SHAPE = "shape"
    SHARED = "shared"
    ORDER = "order"
    PROFIT = "profit"
    NO_KERNEL = "no-kernel"
    BANNED = "banned"
    PATTERN = "pattern"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node comes from: its name in the graph and the user's line.

    Attributes:
        node: Name of the node in the graph of its stage.
        op: Name of its op, such as ``aten.linear``.
        source: ``file:line: code`` of the user's source, or the module's path, or "".
        module: Dotted path of the module that the node belongs to, or "".
    """

    node: str
    op: str
    source: str = ""
    module: str = ""

    def __str__(self) -> str:
        where = self.module or self.source
        return f"{self.op} ({where})" if where else f"{self.op} %{self.node}"


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events."""

    stage: str


@dataclass(frozen=True, slots=True)
class Fired(Event):
    """A rule or pass changed the graph.

    Attributes:
        rule: Name of the rule.
        key: Stable identity of this rewrite within one compilation.
        exactness: Class of the rewrite.
        places: The source nodes that it consumed.
        made: Names of the nodes that it made.
        note: A word about what was decided, for people.
        predicted_gain: Seconds saved per call by the cost model, if it was asked.
    """

    rule: str
    key: str
    exactness: Exactness
    places: tuple[Place, ...]
    made: tuple[str, ...] = ()
    note: str = ""
    predicted_gain: float | None = None


@dataclass(frozen=True, slots=True)
class Missed(Event):
    """A rule that looked at a node and declined.

    Attributes:
        rule: Name of the rule.
        code: Why, for machines.
        reason: Why, for people.
        anchor: The node that it looked at.
        at: The node that stands in the way.
        progress: How close the rule came to firing; orders the rules that looked at a node.
        pattern: The pattern of the rule with a caret under the part that did not match, in two
            lines; "" where the rule has no pattern.
    """

    rule: str
    code: MissCode
    reason: str
    anchor: Place
    at: Place
    progress: int = 0
    pattern: str = ""


@dataclass(frozen=True, slots=True)
class Lowered(Event):
    """A kernel was chosen, or the op was expanded (``kernel == "expand"``).

    Attributes:
        place: The op that was lowered.
        kernel: Name of the kernel.
        what: The op in words: types, granularities, epilogue.
        predicted: Seconds per call by the cost model; ``None`` when it was not costed.
        losers: The kernels that were not taken, each with its reason.
        why: Why this kernel.
    """

    place: Place
    kernel: str
    what: str = ""
    predicted: float | None = None
    losers: tuple[tuple[str, str], ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class Left(Event):
    """A quantize or dequantize that stays in the graph as an op of its own, and why."""

    place: Place
    reason: str


@dataclass(frozen=True, slots=True)
class Noted(Event):
    """Anything else that a user should know; ``warn`` marks what should be acted on."""

    text: str
    place: Place | None = None
    warn: bool = False


@dataclass(frozen=True, slots=True)
class Checked(Event):
    """The outcome of a value check: of one site, or of the whole model."""

    what: str
    passed: bool
    exactness: Exactness
    error: float
    allowed: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class RolledBack(Event):
    """A rewrite that was undone because it changed values; ``repro`` rebuilds the case."""

    rule: str
    key: str
    places: tuple[Place, ...]
    reason: str
    repro: str = ""


E = TypeVar("E", bound=Event)


class EventLog:
    """An append-only list of events.

    Args:
        events: What it begins with.
    """

    __slots__ = ("_events",)

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._events = list(events)

    @property
    def events(self) -> tuple[Event, ...]:
        """The events so far, in order."""
        return tuple(self._events)

    def add(self, event: Event) -> None:
        """Append ``event``."""
        self._events.append(event)

    def of(self, kind: type[E]) -> tuple[E, ...]:
        """Return the events of one kind, in order."""
        return tuple(e for e in self._events if isinstance(e, kind))

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    def __len__(self) -> int:
        return len(self._events)
