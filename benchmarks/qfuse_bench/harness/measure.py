"""Interleaved timing: every round times every contender, in a random order.

Load and clock changes affect all contenders of a round, so contenders are compared by pairs within
rounds, never by figures of separate runs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from qfuse_bench.harness.process import WorkerError
from qfuse_bench.harness.stats import Ratio, median, quantile, ratio_of_medians

LEAST_ROUNDS = 15
"""Fewer rounds do not give a useful interval."""

_BLOCK_SECONDS = 0.08
_LEAST_CALLS = 3
_MOST_CALLS = 200
_TRIAL_CALLS = 3
# One call that takes so long is a block of its own: a stall of the machine is short beside it.
_LONG_SECONDS = 0.5


class Timeable(Protocol):
    """Something that can be timed, such as a worker."""

    def time_block(self, calls: int) -> list[float]:
        """Return the seconds of each of ``calls`` calls."""


@dataclass(frozen=True, slots=True)
class TimedFunction:
    """Times a function in this process.

    Attributes:
        run: The function.
    """

    run: Callable[[], object]

    def time_block(self, calls: int) -> list[float]:
        """Return the seconds of each of ``calls`` calls."""
        seconds = []
        for _ in range(calls):
            start = time.perf_counter()
            self.run()
            seconds.append(time.perf_counter() - start)
        return seconds


@dataclass(slots=True)
class Series:
    """The times of one contender.

    Attributes:
        rounds: Median of each round's block of calls, in seconds.
        calls: Every call, in seconds.
        failed: Why it was dropped; "" if it was not.
    """

    rounds: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)
    failed: str = ""

    @property
    def median(self) -> float:
        """Median over rounds."""
        return median(self.rounds)

    @property
    def p10(self) -> float:
        """The 10th percentile of calls: the time on an idle machine."""
        return quantile(self.calls, 0.1)

    @property
    def p90(self) -> float:
        """The 90th percentile of calls."""
        return quantile(self.calls, 0.9)


def measure(  # noqa: PLR0913 - how to measure, each with a default
    contenders: Mapping[str, Timeable],
    rounds: int,
    *,
    seed: int = 0,
    block_seconds: float = _BLOCK_SECONDS,
    least_calls: int = _LEAST_CALLS,
    before_round: Callable[[], None] = lambda: None,
    after_round: Callable[[], None] = lambda: None,
) -> dict[str, Series]:
    """Time contenders in interleaved rounds.

    Each gets, in every round, a block of calls that lasts about ``block_seconds``. One that fails
    is dropped, with its reason; the rounds of the others go on.

    Args:
        contenders: What to time, by name.
        rounds: How many rounds.
        seed: Of the orders.
        block_seconds: Length of a block.
        least_calls: Minimum calls per block, unless one takes over half a second.
        before_round: Called before every round, as to wait for a quiet moment.
        after_round: Called after every round.
    """
    order = list(contenders)
    draw = random.Random(seed)
    series = {name: Series() for name in order}
    calls: dict[str, int] = {}

    def timed(name: str, number: int) -> list[float]:
        try:
            return contenders[name].time_block(number)
        except WorkerError as error:
            series[name] = Series(failed=str(error))
            return []

    for name in order:
        trial = timed(name, min(_TRIAL_CALLS, least_calls))
        if trial:
            usual = median(trial)
            wanted = int(block_seconds / max(usual, 1e-9))
            least = 1 if usual > _LONG_SECONDS else least_calls
            calls[name] = min(max(wanted, least), _MOST_CALLS)
    for _ in range(rounds):
        before_round()
        draw.shuffle(order)
        for name in order:
            block = [] if series[name].failed else timed(name, calls[name])
            if block:
                series[name].rounds.append(median(block))
                series[name].calls.extend(block)
        after_round()
    return series


def compare(ours: Series, theirs: Series) -> Ratio | None:
    """Return the ratio of ``ours`` to ``theirs``; ``None`` if one of them failed."""
    if ours.failed or theirs.failed:
        return None
    return ratio_of_medians(ours.rounds, theirs.rounds)
