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
# In a model, other layers run between two uses of a weight.
_FLUSHED_BYTES = 64 << 20


def interleaved_medians(runs: Sequence[Run]) -> list[float]:
    """Return the median seconds of one call of each function, with weights in memory.

    Rounds are interleaved, so that other load hits all alike. The first round warms up: code is
    loaded and buffers are allocated.
    """
    evicted = torch.ones(_FLUSHED_BYTES // 8, dtype=torch.float64, device="cpu")
    samples: list[list[float]] = [[] for _ in runs]
    for number in range(_ROUNDS + 1):
        for run, taken in zip(runs, samples, strict=True):
            torch.sum(evicted)
            begin = time.perf_counter()
            run()
            seconds = time.perf_counter() - begin
            if number:
                taken.append(seconds)
    return [median(taken) for taken in samples]
