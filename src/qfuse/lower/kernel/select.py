"""Choosing a kernel: every row of the table is asked, the cheapest that accepts wins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qfuse.cost.model import CostModel
from qfuse.lower.kernel.protocol import Claim, LinearKernel, LinearProblem, Refusal
from qfuse.targets.target import Target


@dataclass(frozen=True, slots=True)
class Choice:
    """The outcome for one op.

    Attributes:
        kernel: The winner; ``None`` means that the op is expanded.
        claim: What the winner takes.
        seconds: Its predicted time per call.
        losers: Everybody else, with the reason.
    """

    kernel: LinearKernel | None
    claim: Claim | None
    seconds: float | None
    losers: tuple[tuple[str, str], ...]


def choose(
    problem: LinearProblem, kernels: Sequence[LinearKernel], target: Target, cost: CostModel
) -> Choice:
    """Ask every kernel and take the one that the cost model finds cheapest.

    Ties go to the earlier row, so the outcome depends on the table and the profile alone.
    """
    offers: list[tuple[float, int, LinearKernel, Claim]] = []
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
