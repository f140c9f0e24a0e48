"""Compilation events as data. One list of events feeds the table, the JSON and the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar


class Exactness(StrEnum):
    """How far a rewrite may change values (see ``rewrite/tolerance.py``).

    ``ASSUMED`` is exact if parameters without values are equal whenever their metadata match.
    It occurs only on graphs of meta tensors, and only if the user enabled it.
    """

    EXACT = "exact"
    ROUNDING = "rounding"
    LOSSY = "lossy"
    ASSUMED = "assumed"


class MissCode(StrEnum):
    """Why a rule did not fire, as a stable code. The message beside it is for users."""

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
        made: Names of the nodes that it created.
        note: A note for users about the decision.
        predicted_gain: Seconds saved per call according to the cost model, if it was used.
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
    """A rule that was tried at a node and did not fire.

    Attributes:
        rule: Name of the rule.
        code: Why, as a stable code.
        reason: Why, as a message for users.
        anchor: The node at which it was tried.
        at: The node at which the match failed.
        progress: How close the rule came to firing; ranks the rules that were tried at a node.
        pattern: The pattern of the rule with a caret under the part that did not match, in two
            lines; "" if the rule does not use a pattern.
        held: Number of conditions of the pattern that hold.
        conditions: The fewest that have to hold on the way that was tried; 0 without a pattern.
    """

    rule: str
    code: MissCode
    reason: str
    anchor: Place
    at: Place
    progress: int = 0
    pattern: str = ""
    held: int = 0
    conditions: int = 0

    @property
    def how_far(self) -> str:
        """How many conditions hold, in words; "" if they are not counted."""
        return _how_far(self.held, self.conditions)

    @property
    def told(self) -> str:
        """The rule, how far it came, and why it did not fire."""
        far = f" ({self.how_far})" if self.how_far else ""
        return f"{self.rule}{far}: {self.reason}"


def _how_far(held: int, conditions: int) -> str:
    return f"{held} of {conditions} conditions hold" if conditions else ""


EXPAND = "expand"
"""In place of a kernel: the op became ATen ops."""

FLOAT = "float"
"""In place of a kernel: a float product on dequantized operands, since it is faster."""

HOST = "torch"
"""In place of a kernel: a backend was asked to claim the op, refused, and torch runs it."""

NO_KERNELS = frozenset({EXPAND, FLOAT, HOST})
"""What stands in place of a kernel."""


class ExpandCause(StrEnum):
    """Why an op was expanded to ATen instead of running on a kernel.

    ``PROFIT``: a float product is faster. ``LOOPS``: the op computes in float
    between kernels, and the compiler makes loops of it. Only the others leave a quantized op
    without a quantized kernel.
    """

    NO_KERNEL = "no-kernel"
    PROFIT = "profit"
    DENIED = "denied"
    LOOPS = "loops"


@dataclass(frozen=True, slots=True)
class KernelProgress:
    """How close a kernel came to running an op.

    Attributes:
        kernel: Its name, as among the losers.
        held: Number of its conditions that hold before the first that does not. They are checked
            in order, and those behind the first that does not hold were not tested.
        conditions: Number of all its conditions; 0 for an alternative without, such as loops.
        failed: The condition that does not hold; "" if all hold, or it is not declared.
    """

    kernel: str
    held: int = 0
    conditions: int = 0
    failed: str = ""

    @property
    def how_far(self) -> str:
        """How many conditions hold, in words; "" if all do, or if they are not counted."""
        return _how_far(self.held, self.conditions) if self.held < self.conditions else ""

    @property
    def label(self) -> str:
        """The kernel, and how far it came."""
        return f"{self.kernel} ({self.how_far})" if self.how_far else self.kernel

    @property
    def share(self) -> float:
        """The share of the conditions that hold; the larger, the closer it came."""
        return self.held / self.conditions if self.conditions else 0.0


@dataclass(frozen=True, slots=True)
class Lowered(Event):
    """A kernel was chosen, a backend claimed the op, or the op was expanded.

    Attributes:
        place: The op that was lowered.
        kernel: Name of the kernel or of the backend; :data:`EXPAND` or :data:`HOST` without one.
        what: A description of the op: dtypes, granularities, epilogue.
        predicted: Seconds per call by the cost model; ``None`` when it was not costed.
        losers: The rejected kernels, each with its reason.
        why: Why this kernel.
        cause: Why the op was expanded; ``None`` if it was not.
        dequantized: Whether the kernel reads a dequantized activation, because none reads both
            operands as they are quantized.
        measured: Whether ``predicted`` was measured on the machine instead.
        rival_seconds: Seconds per call of the best kernel, for an op that runs in float instead.
        added_bytes: By how much a weight that is dequantized at compile time enlarges the
            constants. Ops that share a weight share them: the first one has them all.
        weight_only: Whether the kernel multiplies floats by a quantized weight.
        progress: How close each of the losers came, in their order; empty if it is not known.
        measured_float: Measured seconds per call of its product in float, without the loops around
            it; ``None`` if that was not measured.
    """

    place: Place
    kernel: str
    what: str = ""
    predicted: float | None = None
    losers: tuple[tuple[str, str], ...] = ()
    why: str = ""
    cause: ExpandCause | None = None
    dequantized: bool = False
    measured: bool = False
    rival_seconds: float | None = None
    added_bytes: int = 0
    weight_only: bool = False
    progress: tuple[KernelProgress, ...] = ()
    measured_float: float | None = None

    @property
    def lost(self) -> tuple[tuple[KernelProgress, str], ...]:
        """How close each of the losers came, with its reason."""
        known = self.progress
        if len(known) != len(self.losers):
            known = tuple(KernelProgress(name) for name, _ in self.losers)
        return tuple(zip(known, (reason for _, reason in self.losers), strict=True))

    @property
    def nearest(self) -> tuple[tuple[KernelProgress, str], ...]:
        """The losers with their reasons, the one that came closest first.

        Those that came equally close stay in the order of the registry.
        """
        return tuple(sorted(self.lost, key=lambda pair: -pair[0].share))

    @property
    def closest(self) -> str:
        """The kernel that came closest, how far it came, and why it was not taken; or ""."""
        if not self.losers:
            return ""
        progress, reason = self.nearest[0]
        return f"{progress.label}: {reason}"

    @property
    def failed(self) -> bool:
        """Whether this is a quantized op that runs on no quantized kernel, and not by choice."""
        return self.cause in {ExpandCause.NO_KERNEL, ExpandCause.DENIED}


@dataclass(frozen=True, slots=True)
class Estimated(Event):
    """The size and the predicted times of an op before lowering.

    There is one for every product, quantize and dequantize, and for what a rule declined.

    Attributes:
        place: The op.
        multiply_adds: Multiply-adds per call at the traced sizes; 0 for an op that moves data.
        float_seconds: Predicted seconds per call in float, or those of the pass over memory.
        int8_seconds: Predicted seconds per call on 8-bit integers, with the pass that quantizes
            the activation; ``None`` for an op that is not a product.
        upstream: Names of nodes that its operands are computed from, nearest first; a few.
    """

    place: Place
    multiply_adds: int
    float_seconds: float
    int8_seconds: float | None = None
    upstream: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Left(Event):
    """A quantize, dequantize or requantize op that was not fused, and why.

    Attributes:
        place: The op.
        reason: Why, as a message for users.
        needed: Whether quantized ops or the caller of the model need its result, as they need the
            quantized activations of dynamic quantization.
    """

    place: Place
    reason: str
    needed: bool = False


@dataclass(frozen=True, slots=True)
class Noted(Event):
    """Any other note to the user; ``warn`` marks notes that call for action.

    Attributes:
        text: The note.
        place: What it is about; ``None`` for the whole model.
        warn: Whether it calls for action.
        do: What to do, if it is about one place.
        seconds: Predicted seconds per call that this saves, if known.
    """

    text: str
    place: Place | None = None
    warn: bool = False
    do: str = ""
    seconds: float | None = None


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
    """A rewrite that was undone because it changed values.

    Attributes:
        rule: Name of the rule.
        key: Key of the rewrite: ``stage/rule@node``.
        places: Where it happened.
        reason: What was wrong.
        repro: The command that replays it, or how to have that kept.
        error: The error in the measure that decided; ``None`` if nothing was measured.
        allowed: The bound on ``error``.
    """

    rule: str
    key: str
    places: tuple[Place, ...]
    reason: str
    repro: str = ""
    error: float | None = None
    allowed: float | None = None


E = TypeVar("E", bound=Event)


class EventLog:
    """An append-only list of events.

    Args:
        events: The initial events.
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
