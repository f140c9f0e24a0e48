"""Times functions against each other on a machine that does other things too."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

Run = Callable[[], object]
Timer = Callable[[Sequence[Run]], "list[float]"]
"""Takes functions that compute the same; returns the seconds of a call of each."""

_ROUNDS = 9
# What takes longer warms its own caches.
_WARM_SECONDS = 2e-3
# Of calls that take very long, fewer tell enough.
_LONG_SECONDS, _LONG_ROUNDS = 0.1, 3
# A sample has as many calls as take this long.
_SAMPLE_SECONDS = 0.5e-3
_MOST_CALLS = 64


def interleaved_medians(runs: Sequence[Run]) -> list[float]:
    """Return the median seconds of one call of each function.

    Rounds are interleaved, so that other load hits all alike. Calls before them warm up: code is
    loaded, buffers are allocated, and it is seen how long a call takes. If kernels run on the
    calling thread alone, its own clock is read, which stops while another process has the core.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    calls = [_calls_per_sample(run, clock) for run in runs]
    samples: list[list[float]] = [[] for _ in runs]
    for number in range(_ROUNDS):
        for run, count, taken in zip(runs, calls, samples, strict=True):
            if number >= _LONG_ROUNDS and median(taken) > _LONG_SECONDS:
                continue
            if not taken or taken[-1] < _WARM_SECONDS:
                # The others have evicted everything that a model keeps in a cache.
                run()
            taken.append(_seconds(run, count, clock) / count)
    return [median(taken) for taken in samples]


def _calls_per_sample(run: Run, clock: Callable[[], float]) -> int:
    run()
    taken = max(_seconds(run, 1, clock), _SAMPLE_SECONDS / _MOST_CALLS)
    return max(1, int(_SAMPLE_SECONDS / taken))


def _seconds(run: Run, calls: int, clock: Callable[[], float]) -> float:
    begin = clock()
    for _ in range(calls):
        run()
    return clock() - begin
