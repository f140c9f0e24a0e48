"""Kernel selection: of the kernels that cover and accept a problem, the cheapest is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qfuse.cost import seconds_text
from qfuse.cost.model import CostModel
from qfuse.ir.refusal import Refusal
from qfuse.lower.problems.claim import Claim
from qfuse.lower.problems.problem import Problem
from qfuse.lower.select.kernel import Kernel
from qfuse.targets.target import Target

Losers = tuple[tuple[str, str], ...]
"""The alternatives that were not selected, each with the reason."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A kernel that accepts a problem.

    Attributes:
        kernel: The kernel.
        claim: The part that it accepts.
        seconds: Its predicted time per call.
    """

    kernel: Kernel[Any]
    claim: Claim
    seconds: float


@dataclass(frozen=True, slots=True)
class Rival:
    """An alternative to a kernel, which may be faster.

    Attributes:
        name: The name in the report.
        seconds: Its predicted time per call.
        shown: Whether the report lists it when it loses.
    """

    name: str
    seconds: float
    shown: bool = True


@dataclass(frozen=True, slots=True)
class Choice:
    """The outcome for one problem.

    Attributes:
        offer: The winner; ``None`` if no kernel was selected.
        losers: All other alternatives, with the reason.
    """

    offer: Offer | None
    losers: Losers

    @property
    def seconds(self) -> float | None:
        """The predicted time per call of the winner."""
        return None if self.offer is None else self.offer.seconds


def select(
    problem: Problem,
    kernels: Sequence[Kernel[Any]],
    target: Target,
    cost: CostModel,
) -> Choice:
    """Ask every kernel that covers ``problem``, and select the one with the least predicted time.

    Ties go to the earlier kernel, so the outcome depends on the registry and the profile alone. A
    kernel that is not faster than its rival is not selected.
    """
    offers: list[Offer] = []
    losers: list[tuple[str, str]] = []
    for kernel in kernels:
        if problem.span not in kernel.covers:
            continue
        answer = kernel.supported(target) or kernel.accepts(problem)
        if isinstance(answer, Refusal):
            losers.append((problem.label(kernel.name), answer.reason))
        else:
            offers.append(Offer(kernel, answer, cost.seconds(answer.work)))
    if not offers:
        return Choice(None, tuple(losers))
    # The sort is stable, so ties keep the order of the registry.
    offers.sort(key=lambda offer: offer.seconds)
    best = offers[0]
    if problem.has_rival:
        return Choice(best, tuple(losers))
    losers += [(problem.label(o.kernel.name), _slower(o, best)) for o in offers[1:]]
    return Choice(best, tuple(losers))


def against(choice: Choice, problem: Problem, rival: Rival | None) -> Choice:
    """Return ``choice``, or one without a kernel if ``rival`` is as fast."""
    if choice.offer is None or rival is None:
        return choice
    mine, theirs = choice.offer.seconds, rival.seconds
    if mine < theirs:
        shown = ((rival.name, f"predicted {seconds_text(theirs)}"),) if rival.shown else ()
        return Choice(choice.offer, (*choice.losers, *shown))
    text = f"predicted {seconds_text(mine)}, {rival.name} {seconds_text(theirs)}"
    losers = (*choice.losers, (problem.label(choice.offer.kernel.name), text))
    return Choice(None, losers)


def _slower(offer: Offer, best: Offer) -> str:
    mine, name, theirs = offer.seconds * 1e6, best.kernel.name, best.seconds * 1e6
    return f"predicted {mine:.0f} us, {name} {theirs:.0f} us"
