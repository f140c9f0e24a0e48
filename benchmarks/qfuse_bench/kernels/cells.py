"""One cell of the kernels' benchmark: contenders for one shape, timed in interleaved rounds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from qfuse_bench.harness.measure import Series, Timeable, compare, measure
from qfuse_bench.harness.stats import Ratio
from qfuse_bench.kernels.contenders import OURS, Contender, Family, Shape
from qfuse_bench.kernels.families import FAMILIES
from qfuse_bench.kernels.roofline import Limits, Reader

READ = "memory"
"""The contender that only reads as many bytes as ours has to: cold cells of few rows have it."""

MOST_STREAMED_ROWS = 4
"""So few rows are bound by reading the weight."""

_STILL_SECONDS = 1e-3
_LOOKS = 5
_PAUSE_SECONDS = 0.02
_REGION_ELEMENTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Cell:
    """What was measured for one shape.

    Attributes:
        family: Name of the family.
        shape: Sizes of the product.
        cold: Weights came from memory; if not, from whatever cache holds them.
        series: Times by contender, ours among them.
    """

    family: str
    shape: Shape
    cold: bool
    series: Mapping[str, Series]

    @property
    def ours(self) -> Series:
        """The times of qfuse."""
        return self.series[OURS]

    def reached(self, limits: Limits) -> float:
        """Return the fraction of the machine's limit that was reached."""
        return self.limit(limits) / self.ours.median

    def limit(self, limits: Limits) -> float:
        """Return the least time that the machine allows for it, in seconds."""
        return limits.seconds(FAMILIES[self.family].kinds[OURS], self.shape, cold=self.cold)

    def ratio(self, peer: str) -> Ratio | None:
        """Return qfuse's time over a peer's; ``None`` if the peer is not in the cell."""
        if peer not in self.series:
            return None
        return compare(self.ours, self.series[peer])


class Stillness:
    """Waits for moments in which a parallel region takes no longer than it should.

    On cores that others use too, a region waits until the scheduler has given every thread its
    slice: several milliseconds for some microseconds of work. Looking for that costs nothing,
    where asking the system how busy it is takes a good part of a second.

    Args:
        seconds: How long to wait in all.
    """

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._data = torch.zeros(_REGION_ELEMENTS)

    def wait(self) -> None:
        """Return when the machine is idle, or the time is used up."""
        while self._left > 0:
            start = time.perf_counter()
            if max(self._region() for _ in range(_LOOKS)) < _STILL_SECONDS:
                return
            time.sleep(_PAUSE_SECONDS)
            self._left -= time.perf_counter() - start

    def _region(self) -> float:
        start = time.perf_counter()
        self._data.add_(1)
        return time.perf_counter() - start


@dataclass(slots=True)
class Rotating:
    """Calls a contender, with one copy of its weight after the other.

    Attributes:
        contender: What is called.
        cold: Take the next copy in every call; if not, always the first one.
        turn: How many calls there were.
    """

    contender: Contender
    cold: bool
    turn: int = 0

    def time_block(self, calls: int) -> list[float]:
        """Return the seconds of each of ``calls`` calls."""
        seconds = []
        for _ in range(calls):
            copy = self.turn % self.contender.copies if self.cold else 0
            self.turn += 1
            start = time.perf_counter()
            self.contender.run(copy)
            seconds.append(time.perf_counter() - start)
        return seconds


def cold_and_warm(family: Family, k: int, n: int, limits: Limits) -> tuple[bool, ...]:
    """Return the cells: warm ones only if each contender's weight fits in a cache."""
    most = max(kind.weight_bytes(k, n) for kind in family.kinds.values())
    return (True, False) if most <= limits.cache_bytes else (True,)


@dataclass(frozen=True, slots=True)
class Plan:
    """How cells are measured.

    Attributes:
        limits: What the machine can do.
        reader: What reads its memory.
        rounds: Interleaved rounds.
        block_seconds: How long each contender runs in each round.
        stillness: Waits for an idle machine before each round.
    """

    limits: Limits
    user: Reader
    rounds: int
    block_seconds: float
    stillness: Stillness

    def measure(
        self, family: str, shape: Shape, contenders: Mapping[str, Contender], *, cold: bool
    ) -> Cell:
        """Measure one cell.

        Args:
            family: Name of the family.
            shape: Sizes of the product.
            contenders: What to time, by name.
            cold: Rotate the copies of the weights.
        """
        kind = FAMILIES[family].kinds[OURS]
        timed: dict[str, Timeable] = {}
        for name, contender in contenders.items():
            contender.run(0)  # generates code, allocates
            timed[name] = Rotating(contender, cold)
        if cold and shape.m <= MOST_STREAMED_ROWS:
            timed[READ] = self.user.of(kind.bytes(shape))
        series = measure(
            timed,
            self.rounds,
            block_seconds=self.block_seconds,
            least_calls=1,
            before_round=self.stillness.wait,
        )
        return Cell(family, shape, cold, series)
