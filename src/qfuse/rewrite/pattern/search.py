"""The backtracking search of a match: bindings, progress, and the furthest failure.

The search backtracks over alternatives, commuted operands and skipped steps, so it finds a match
if there is one. Two things keep it linear in the size of the pattern. A part that failed at a node
independently of captures and guards is memoized and not tried there again. Repeated captures and
guards may still multiply the work, so a budget of steps, proportional to the size of the pattern,
bounds it; a search that exceeds the budget is a miss that says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.quant.spec import dtype_name
from qfuse.rewrite.rule import Miss

# The budget of a search, in steps per part of the pattern. A search without repeated captures
# needs about two: commutative operands are tried in two orders.
_STEPS_PER_PART = 32
_MOST_STEPS = 20_000


class Mismatch(NamedTuple):
    """Why a part does not accept a value."""

    code: MissCode
    text: str
    fields: Mapping[str, object] = {}


class Counted(Protocol):
    """A part, as far as its conditions are counted."""

    @property
    def least(self) -> int:
        """The fewest conditions of a match."""

    def behind(self, child: object) -> int:
        """Return the fewest conditions that are tested after a nested part."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A part being matched to a value, and the frame of the enclosing part.

    Attributes:
        above: The frame of the enclosing part.
        part: The part.
        node: The value, or the nearest enclosing node if the value is not a node.
    """

    above: Frame | None
    part: Counted
    node: Node

    def trace(self) -> tuple[object, ...]:
        """Return the parts from the root of the pattern to this one."""
        return (*(self.above.trace() if self.above is not None else ()), self.part)

    def open(self) -> int:
        """Return the fewest conditions that enclosing parts test after this one."""
        above = self.above
        return 0 if above is None else above.part.behind(self.part) + above.open()


class Guard(Protocol):
    """A condition on captures."""

    def test(self, bound: Mapping[str, object], node: Node) -> Miss | Mapping[str, object]:
        """Return the captures that the guard binds, or the miss if it does not hold."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A point at which the search failed.

    Attributes:
        frame: The part, and the node that it did not match.
        miss: The reason.
        core: Number of core parts matched so far; the root counts if no part is marked.
        count: Number of parts matched so far.
        held: Number of conditions that hold: parts and guards, also those of parts before.
        left: The fewest conditions of the part that do not hold, or were not tested.
    """

    frame: Frame
    miss: Miss
    core: int
    count: int
    held: int
    left: int

    def further_than(self, other: Failure | None) -> bool:
        """Whether the search came further here than in ``other``; ties keep the first."""
        if other is None:
            return True
        # A failure behind the core is reported and others are not, so it wins whatever the counts
        # are.
        return (self.core > 0, self.count) > (other.core > 0, other.count)

    def details(self) -> Miss:
        """Return the miss with its progress and trace."""
        self.miss.progress = self.count if self.core else 0
        self.miss.trace = self.frame.trace()
        self.miss.held = self.held
        self.miss.conditions = self.held + self.left + self.frame.open()
        return self.miss


@dataclass(frozen=True, slots=True)
class _Shown:
    """A node as message templates see it: ``{x}``, ``{x.shape}``, ``{x.dtype}``.

    Formatted without its name, because the report groups equal messages.
    """

    node: Node

    def __str__(self) -> str:
        return op_name(self.node)

    @property
    def shape(self) -> tuple[object, ...]:
        return tuple(shape_of(self.node))

    @property
    def rank(self) -> int:
        return len(shape_of(self.node))

    @property
    def dtype(self) -> str:
        return dtype_name(dtype_of(self.node))


def shown(values: Mapping[str, object]) -> dict[str, object]:
    """Return captured values as message templates see them."""
    return {k: _Shown(v) if isinstance(v, Node) else v for k, v in values.items()}


class Search:
    """The state of matching one pattern at one node.

    Args:
        root: The node.
        size: Number of parts of the pattern.
        rooted: Whether the root is the core of the pattern, because no part is marked.

    Attributes:
        bound: The captured values by name.
        closest: The failure at which the search came furthest.
        held: Number of conditions that hold.
        conflicts: Number of failures that depend on captures made elsewhere.
    """

    def __init__(self, root: Node, size: int, *, rooted: bool) -> None:
        self.bound: dict[str, object] = {}
        self.closest: Failure | None = None
        self.conflicts = self.held = 0
        self._root = root
        self._rooted = rooted
        self._core = self._count = 0
        self._budget = self._left = min(_STEPS_PER_PART * size, _MOST_STEPS)
        self._dead: dict[tuple[int, Node], tuple[Failure | None, int, int, int]] = {}

    def spend(self) -> bool:
        """Spend one step of the budget; return whether one was left."""
        self._left -= 1
        if self._left < 0:
            # A part that was not tried must not be memoized as failing.
            self.conflicts += 1
        return self._left >= 0

    def enter(self, weight: int, *, core: bool) -> None:
        """Count a part that accepted its value."""
        self._core += core or (self._rooted and self._count == 0)
        self._count += weight

    def leave(self, weight: int, *, core: bool) -> None:
        """Undo :meth:`enter`."""
        self._count -= weight
        self._core -= core or (self._rooted and self._count == 0)

    def agrees(self, name: str, value: object) -> bool:
        """Whether ``name`` is unbound, or bound to ``value``."""
        if name not in self.bound or same_value(self.bound[name], value):
            return True
        self.conflicts += 1
        return False

    def fail(self, frame: Frame, refusal: Mismatch, left: int | None = None) -> None:
        """Record a failure at ``frame``.

        Args:
            frame: The part that did not match.
            refusal: The reason.
            left: The fewest conditions of the part that do not hold; ``None`` is all of them.
        """
        if not self._is_furthest():
            return
        fields = shown({**self.bound, **refusal.fields, "node": frame.node})
        miss = Miss(refusal.code, frame.node, refusal.text, fields=fields)
        self._note(frame, miss, frame.part.least if left is None else left)

    def test(
        self, guards: tuple[Guard, ...], frame: Frame, core_at: int | None = None
    ) -> list[str] | None:
        """Test guards; return the names that they bound, or ``None`` if one does not hold.

        Args:
            guards: The guards.
            frame: The part that they belong to.
            core_at: The number of guards after which the part counts as core; 0 is before all.
        """
        added: list[str] = []
        count, core, held = self._count, self._core, self.held
        for index, guard in enumerate(guards):
            # A mark on the part itself (0) was counted by `enter`.
            self._core += index > 0 and index == core_at
            found = guard.test(self.bound, frame.node)
            if isinstance(found, Miss):
                self.conflicts += 1
                self._note(frame, found, len(guards) - index)
                self.forget(added)
                self._count, self._core, self.held = count, core, held
                return None
            # Each guard that holds counts as progress, so a later failure wins.
            self._count += 1
            self.held += 1
            self.bound.update(found)
            added += found
        self._count, self._core = count, core + bool(core_at)
        return added

    def forget(self, names: list[str], *, core: bool = False) -> None:
        """Undo :meth:`test`."""
        self._core -= core
        for name in names:
            del self.bound[name]

    def is_dead(self, part: object, node: Node) -> bool:
        """Whether ``part`` is known not to match ``node``; its failure is recorded again."""
        known = self._dead.get((id(part), node))
        if known is None:
            return False
        failure, core, count, held = known
        # The same failure counts for more where more parts around it have matched.
        if failure is not None:
            self._keep(
                replace(
                    failure,
                    core=failure.core + self._core - core,
                    count=failure.count + self._count - count,
                    held=failure.held + self.held - held,
                )
            )
        return True

    def bury(self, part: object, node: Node) -> None:
        """Memoize that ``part`` does not match ``node``, with ``closest`` as the reason."""
        self._dead[id(part), node] = self.closest, self._core, self._count, self.held

    def reopen(self, outer: Failure | None) -> None:
        """Restore ``outer``, the closest failure outside of a part, and merge the inner one."""
        inner, self.closest = self.closest, outer
        if inner is not None:
            self._keep(inner)

    def verdict(self) -> Miss:
        """Return the miss of a search without a match."""
        assert self.closest is not None, "a search without a match has failed somewhere"
        miss = self.closest.details()
        if self._left >= 0:
            return miss
        text = "the search for this pattern was given up after {} steps"
        return Miss(MissCode.PATTERN, self._root, text, self._budget, progress=miss.progress)

    def _is_furthest(self) -> bool:
        known = self.closest
        return known is None or (self._core > 0, self._count) > (known.core > 0, known.count)

    def _note(self, frame: Frame, miss: Miss, left: int) -> None:
        self._keep(Failure(frame, miss, self._core, self._count, self.held, left))

    def _keep(self, failure: Failure) -> None:
        if failure.further_than(self.closest):
            self.closest = failure


def same_value(one: object, other: object) -> bool:
    """Whether two arguments are the same: one node, one constant, or equal numbers or bools."""
    if isinstance(one, Node) or isinstance(other, Node):
        return one is other or (
            isinstance(one, Node)
            and isinstance(other, Node)
            and one.op == other.op == "get_attr"
            and one.target == other.target
        )
    # NaN differs from itself, but two NaN literals are one argument.
    if isinstance(one, float) and isinstance(other, float) and one != one:  # noqa: PLR0124
        return other != other  # noqa: PLR0124
    # Python has `True == 1`, but an op takes the two differently.
    if isinstance(one, bool) != isinstance(other, bool):
        return False
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same_value, one, other))
    return one == other
