"""Kernel selection: of the kernels that cover and accept a problem, the cheapest is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qfuse.cost import seconds_text
from qfuse.cost.model import CostModel
from qfuse.cost.times import Seconds
from qfuse.ir.events import KernelProgress
from qfuse.ir.refusal import Refusal
from qfuse.lower.problems.claim import Claim
from qfuse.lower.problems.conditions import Unmet
from qfuse.lower.problems.problem import Problem
from qfuse.lower.select.kernel import Conditional, Kernel
from qfuse.targets.target import Target


@dataclass(frozen=True, slots=True)
class Loser:
    """An alternative that was not selected.

    Attributes:
        progress: Its name in the report, and how many of its conditions hold.
        reason: Why.
    """

    progress: KernelProgress
    reason: str


Losers = tuple[Loser, ...]
"""The alternatives that were not selected."""

TARGET = "the target has the kernel"
"""The first condition of every kernel."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A kernel that accepts a problem.

    Attributes:
        kernel: The kernel.
        claim: The part that it accepts.
        seconds: Its time per call: measured if it is known, otherwise predicted.
        predicted: Its predicted time per call.
        measured: Whether ``seconds`` was measured.
    """

    kernel: Kernel[Any]
    claim: Claim
    seconds: float
    predicted: float
    measured: bool = False

    @property
    def how(self) -> str:
        """How the time is known: ``measured`` or ``predicted``."""
        return "measured" if self.measured else "predicted"


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


@dataclass(frozen=True, slots=True)
class Asked:
    """The answers of all kernels that cover a problem.

    Attributes:
        offers: The kernels that accept it, in the order of the registry.
        refusals: The others, with the reason.
    """

    offers: tuple[Offer, ...]
    refusals: Losers


def ask(problem: Problem, kernels: Sequence[Kernel[Any]], target: Target, cost: CostModel) -> Asked:
    """Ask every kernel that covers ``problem``, and predict the times of those that accept."""
    offers: list[Offer] = []
    losers: list[Loser] = []
    for kernel in kernels:
        if problem.span not in kernel.covers:
            continue
        missing = kernel.supported(target)
        if isinstance(missing, Refusal):
            count = _count(kernel, problem)
            progress = KernelProgress(problem.label(kernel.name), 0, count, TARGET)
            losers.append(Loser(progress, missing.reason))
            continue
        answer = kernel.accepts(problem)
        if isinstance(answer, Refusal):
            losers.append(_refused(problem.label(kernel.name), answer))
        else:
            seconds = cost.seconds(answer.work)
            offers.append(Offer(kernel, answer, seconds, seconds))
    return Asked(tuple(offers), tuple(losers))


def _refused(name: str, answer: Refusal) -> Loser:
    """Return a kernel that refuses, and how far it came; that the target has it is a condition."""
    if isinstance(answer, Unmet):
        count = answer.conditions + 1
        progress = KernelProgress(name, answer.held + 1, count, answer.failed)
        return Loser(progress, answer.reason)
    # Which conditions it has is not known.
    return Loser(KernelProgress(name, 0, 1), answer.reason)


def _count(kernel: Kernel[Any], problem: Problem) -> int:
    """Return the number of conditions of a kernel; one that declares none has one."""
    return 1 + len(kernel.conditions(problem)) if isinstance(kernel, Conditional) else 1


def accepting(offer: Offer, problem: Problem, reason: str) -> Loser:
    """Return a kernel that accepts ``problem``, and was not selected: all conditions hold."""
    count = _count(offer.kernel, problem)
    return Loser(KernelProgress(problem.label(offer.kernel.name), count, count), reason)


def select(asked: Asked, problem: Problem, cost: CostModel, known: Seconds) -> Choice:
    """Select the kernel with the least time.

    Ties go to the earlier kernel, so the outcome depends on the registry, the profile and the
    measured times alone. Kernels that were too slow by prediction to be measured come last.

    Args:
        asked: The answers of the kernels.
        problem: The problem.
        cost: Predicts the compiled loops around a measured kernel.
        known: Measured seconds by the name of a kernel.
    """
    losers = list(asked.refusals)
    # The sort is stable, so ties keep the order of the registry.
    offers = sorted(
        (_with_time(offer, cost, known) for offer in asked.offers),
        key=lambda offer: (not offer.measured, offer.seconds),
    )
    if not offers:
        return Choice(None, tuple(losers))
    best = offers[0]
    if problem.has_rival:
        return Choice(best, tuple(losers))
    losers += [accepting(o, problem, _slower(o, best)) for o in offers[1:]]
    return Choice(best, tuple(losers))


def _with_time(offer: Offer, cost: CostModel, known: Seconds) -> Offer:
    """Return the offer with its measured time, and the predicted one of the loops around it."""
    seconds = known.get(offer.kernel.name)
    if seconds is None:
        return offer
    seconds += cost.loop_seconds(offer.claim.work)
    return Offer(offer.kernel, offer.claim, seconds, offer.predicted, True)


def against(choice: Choice, problem: Problem, rival: Rival | None) -> Choice:
    """Return ``choice``, or one without a kernel if ``rival`` is as fast."""
    if choice.offer is None or rival is None:
        return choice
    mine, theirs = choice.offer.seconds, rival.seconds
    if mine < theirs:
        slower = Loser(KernelProgress(rival.name), f"predicted {seconds_text(theirs)}")
        shown = (slower,) if rival.shown else ()
        return Choice(choice.offer, (*choice.losers, *shown))
    text = f"predicted {seconds_text(mine)}, {rival.name} {seconds_text(theirs)}"
    return Choice(None, (*choice.losers, accepting(choice.offer, problem, text)))


def _slower(offer: Offer, best: Offer) -> str:
    mine, name, theirs = offer.seconds * 1e6, best.kernel.name, best.seconds * 1e6
    how = f"{best.how} " if best.how != offer.how else ""
    return f"{offer.how} {mine:.0f} us, {name} {how}{theirs:.0f} us"
