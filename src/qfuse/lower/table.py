"""Choosing a kernel: every row of the table is asked, the cheapest that accepts wins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from qfuse.lower.kernel import Priced, Refusal, Row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qfuse.cost.model import CostModel
    from qfuse.targets.target import Target

__all__ = ["Choice", "choose"]

P = TypeVar("P")
C = TypeVar("C", bound=Priced)
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Choice(Generic[P, C, R]):
    """The outcome for one op.

    Attributes:
        kernel: The winner; ``None`` means that the op is expanded.
        claim: What the winner takes.
        seconds: Its predicted time per call.
        losers: Everybody else, with the reason.
    """

    kernel: Row[P, C, R] | None
    claim: C | None
    seconds: float | None
    losers: tuple[tuple[str, str], ...]


def choose(
    problem: P, kernels: Sequence[Row[P, C, R]], target: Target, cost: CostModel
) -> Choice[P, C, R]:
    """Ask every kernel and take the one that the cost model finds cheapest.

    Ties go to the earlier row, so the outcome depends on the table and the profile alone.
    """
    offers: list[tuple[float, int, Row[P, C, R], C]] = []
    losers: list[tuple[str, str]] = []
    for index, kernel in enumerate(kernels):
        refusal = kernel.supported(target)
        answer = refusal if refusal is not None else kernel.accepts(problem)
        if isinstance(answer, Refusal):
            losers.append((kernel.name, answer.reason))
            continue
        offers.append((cost.seconds(answer.work), index, kernel, answer))
    if not offers:
        return Choice(None, None, None, tuple(losers))
    offers.sort(key=lambda offer: offer[:2])
    seconds, _, winner, claim = offers[0]
    losers += [
        (kernel.name, f"predicted {other * 1e6:.0f} us, {winner.name} {seconds * 1e6:.0f} us")
        for other, _, kernel, _ in offers[1:]
    ]
    return Choice(winner, claim, seconds, tuple(losers))
