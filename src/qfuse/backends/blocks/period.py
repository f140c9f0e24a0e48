"""Find the part of a sequence that repeats itself."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

_NEXT = 4
"""How many later equal tokens of each token propose a period."""


@dataclass(frozen=True, slots=True)
class Run:
    """A part of a sequence in which each token equals the one ``period`` later.

    Attributes:
        period: The distance.
        begin: Index of the first token.
        end: Index after the last token.
    """

    period: int
    begin: int
    end: int

    @property
    def times(self) -> int:
        """How often the period fits into the run."""
        return (self.end - self.begin) // self.period

    @property
    def covered(self) -> int:
        """How many tokens are in whole periods."""
        return self.times * self.period


def periodic_runs(tokens: Sequence[Hashable], least: int) -> list[Run]:
    """Return the longest run of each period that fits ``least`` times, widest coverage first.

    >>> periodic_runs("xabcabcabcy", 3)
    [Run(period=3, begin=1, end=10)]
    """
    known: dict[Hashable, int] = {}
    numbers = [known.setdefault(token, len(known)) for token in tokens]
    periods = _distances(numbers, len(numbers) // least)
    runs = [run for p in periods if (run := _longest(numbers, p)).times >= least]
    return sorted(runs, key=lambda run: (-run.covered, run.period))


def _distances(numbers: Sequence[int], most: int) -> list[int]:
    """Return the distances between a token and the next ones that are equal."""
    places: dict[int, list[int]] = {}
    for index, number in enumerate(numbers):
        places.setdefault(number, []).append(index)
    found = {
        after - before
        for where in places.values()
        for step in range(1, _NEXT + 1)
        for before, after in zip(where, where[step:], strict=False)
    }
    return sorted(distance for distance in found if distance <= most)


def _longest(numbers: Sequence[int], period: int) -> Run:
    best = Run(period, 0, 0)
    begin = 0
    for index in range(len(numbers) - period + 1):
        last = index + period == len(numbers)
        if last or numbers[index] != numbers[index + period]:
            # The run ends with the period after its last equal token.
            if index > begin and index - begin + period > best.end - best.begin:
                best = Run(period, begin, index + period)
            begin = index + 1
    return best
