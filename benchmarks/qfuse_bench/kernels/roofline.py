"""The limits of this machine: memory bandwidth and arithmetic rate.

Measured on the spot with the threads that the contenders have. A figure is the best of several
kernels that do nothing else, each by the time that one call in ten stays below: waiting for other
programs is no property of the machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from qfuse.targets.huge_pages import HugePages
from qfuse_bench.harness.measure import Series, measure
from qfuse_bench.kernels.contenders import Arithmetic, Kind, Shape
from qfuse_bench.kernels.families import FAMILIES

LEAST_CACHE_BYTES = 16 << 20
"""The last-level cache is taken to be at least this large, where its size is not known."""

_ROUNDS = 11
_MOST_READINGS = 3
_BLOCK_SECONDS = 0.02
# In the caches, and enough of everything that starting threads does not show.
_PEAKS = (Shape(512, 1024, 2048), Shape(96, 1024, 2048))
_PEAK_FAMILIES = {
    Arithmetic.INT8: ("w8a8", "w8a8-static"),
    Arithmetic.BF16: ("w8a16",),
    Arithmetic.F32: ("w8a32",),
}


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads memory, and can be timed.

    Attributes:
        run: Reads it all once.
        amount: How many bytes that is.
    """

    run: Callable[[], object]
    amount: int

    def time_block(self, calls: int) -> list[float]:
        """Return the seconds of each of ``calls`` readings."""
        return [self._once() for _ in range(calls)]

    def of(self, amount: int) -> _Share:
        """Return the reading of so many bytes, timed by that of all."""
        return _Share(self, amount / self.amount)

    def _once(self) -> float:
        start = time.perf_counter()
        self.run()
        return time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class _Share:
    whole: Reader
    share: float

    def time_block(self, calls: int) -> list[float]:
        """Return seconds; each reading is long, so there are few."""
        few = min(calls, _MOST_READINGS)
        return [self.share * seconds for seconds in self.whole.time_block(few)]


@dataclass(frozen=True, slots=True)
class Limits:
    """Speeds of this machine.

    Attributes:
        cache_bytes: Size of the last-level cache.
        memory: Bytes per second from memory.
        cache: Bytes per second from the last-level cache.
        rates: Operations per second of each arithmetic.
    """

    cache_bytes: int
    memory: float
    cache: float
    rates: Mapping[Arithmetic, float]

    def seconds(self, kind: Kind, shape: Shape, *, cold: bool) -> float:
        """Return the least time of a call: for its bytes or for its operations."""
        bandwidth = self.memory if cold else self.cache
        return max(kind.bytes(shape) / bandwidth, shape.operations / self.rates[kind.arithmetic])

    def or_better(self, other: Limits) -> Limits:
        """Return the best that was seen at two times: no machine is faster than it can be."""
        rates = {kind: max(rate, other.rates[kind]) for kind, rate in self.rates.items()}
        memory, cache = max(self.memory, other.memory), max(self.cache, other.cache)
        return Limits(self.cache_bytes, memory, cache, rates)

    def copies(self, weight_bytes: int) -> int:
        """Return how many copies of a weight are twice the last-level cache."""
        return copies_of(weight_bytes, self.cache_bytes)


def copies_of(weight_bytes: int, cache_bytes: int) -> int:
    """Return how many copies of a weight are twice a cache."""
    return max(1, math.ceil(2 * cache_bytes / max(weight_bytes, 1)))


def measure_limits(cache_bytes: int) -> tuple[Limits, Reader]:
    """Measure this machine.

    Args:
        cache_bytes: Size of the last-level cache; 0 if it is not known.

    Returns:
        The limits, and what reads memory fastest.
    """
    known = max(cache_bytes, LEAST_CACHE_BYTES)
    slow, fast = _users(2 * known), _users(known // 4)
    memory = _timed(slow)
    cache = _timed(fast)
    best = min(slow, key=lambda name: memory[name].p10)
    limits = Limits(
        cache_bytes=known,
        memory=slow[best].amount / memory[best].p10,
        cache=max(user.amount / cache[name].p10 for name, user in fast.items()),
        rates={kind: _peak(names) for kind, names in _PEAK_FAMILIES.items()},
    )
    return limits, slow[best]


def _users(amount: int) -> dict[str, Reader]:
    """Return what reads memory and does little else, by name."""
    int64 = HugePages().place(torch.ones(amount // 8, dtype=torch.int64))
    float32, int8 = int64.view(torch.float32), int64.view(torch.int8)
    runs: dict[str, Callable[[], object]] = {
        "sum": int64.sum,
        "max of floats": float32.max,
        "max of bytes": int8.amax,
        "dot": lambda: torch.dot(float32, float32),
    }
    return {name: Reader(run, amount) for name, run in runs.items()}


def _timed(users: Mapping[str, Reader]) -> dict[str, Series]:
    for user in users.values():
        user.run()
    return measure(users, _ROUNDS, block_seconds=_BLOCK_SECONDS, least_calls=1)


@dataclass(frozen=True, slots=True)
class _Call:
    run: Callable[[int], object]

    def time_block(self, calls: int) -> list[float]:
        seconds = []
        for _ in range(calls):
            start = time.perf_counter()
            self.run(0)
            seconds.append(time.perf_counter() - start)
        return seconds


def _peak(families: Iterable[str]) -> float:
    """Return operations per second of the best contender whose weight is in a cache."""
    best = 0.0
    for shape in _PEAKS:
        calls = {}
        for name in families:
            prepared = FAMILIES[name].prepare(shape.k, shape.n, lambda _: 1)
            for contender, made in prepared(shape.m).items():
                made.run(0)
                calls[f"{name} {contender}"] = _Call(made.run)
        series = measure(calls, _ROUNDS, block_seconds=_BLOCK_SECONDS, least_calls=1)
        best = max(best, *(shape.operations / found.p10 for found in series.values()))
    return best
