"""What a kernel requires of a problem, as a list of conditions in the order of their checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from qfuse.ir.refusal import Refusal

P_contra = TypeVar("P_contra", contravariant=True)
P = TypeVar("P")
Q = TypeVar("Q")


@dataclass(frozen=True, slots=True)
class Condition(Generic[P_contra]):
    """One condition of a kernel.

    Attributes:
        name: What holds, such as ``the weight has 8 bits``.
        check: Returns why it does not hold, or ``None``. Those before it in the list hold.
    """

    name: str
    check: Callable[[P_contra], Refusal | None]


Conditions = Sequence[Condition[Any]]
"""All conditions of a kernel for one problem."""


class Unmet(Refusal):
    """The first condition of a kernel that does not hold.

    Args:
        reason: Why it does not hold.
        failed: The name of the condition.
        held: Number of conditions before it, which hold.
        conditions: Number of all conditions; those after the failed one were not tested.
    """

    __slots__ = ("conditions", "failed", "held")

    def __init__(self, reason: str, failed: str, held: int, conditions: int) -> None:
        super().__init__(reason)
        self.failed = failed
        self.held = held
        self.conditions = conditions


def hold(conditions: Sequence[Condition[P]], problem: P) -> Unmet | None:
    """Return the first condition that does not hold for ``problem``, or ``None`` if all do."""
    for held, condition in enumerate(conditions):
        refusal = condition.check(problem)
        if refusal is not None:
            return Unmet(refusal.reason, condition.name, held, len(conditions))
    return None


def on(part: Callable[[Q], P], conditions: Iterable[Condition[P]]) -> tuple[Condition[Q], ...]:
    """Return ``conditions`` for the larger thing that ``part`` takes their subject from."""
    return tuple(Condition(one.name, _composed(part, one.check)) for one in conditions)


def _composed(
    part: Callable[[Q], P], check: Callable[[P], Refusal | None]
) -> Callable[[Q], Refusal | None]:
    return lambda whole: check(part(whole))


def refusal_in(value: object) -> Refusal | None:
    """Return ``value`` if it is a refusal: the check that something can be computed."""
    return value if isinstance(value, Refusal) else None
