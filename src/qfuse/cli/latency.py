"""The measured latency of a model before and after compiling."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram

from qfuse.cost import seconds_text
from qfuse.targets import limited_threads

_ROUNDS = 7
# A slow model is called less often, and at least once.
_BUDGET_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class MeasuredLatency:
    """Medians of interleaved calls.

    Attributes:
        source_seconds: Of the source model, eager.
        compiled_seconds: Of the compiled model.
        calls: Calls of each.
        threads: Threads of torch.
    """

    source_seconds: float
    compiled_seconds: float
    calls: int
    threads: int

    def __str__(self) -> str:
        before, after = seconds_text(self.source_seconds), seconds_text(self.compiled_seconds)
        calls = f"median of {self.calls} interleaved call{'s' * (self.calls != 1)}"
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}"
        return f"measured: source eager {before}, compiled {after} ({calls} each, {threads})"


def measure_latency(
    source: Any, compiled: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> MeasuredLatency:
    """Call the source model and the compiled one by turns, and return the medians.

    Both use the threads of the compiled one. One call of each comes before and is not counted.
    Gradients are not recorded.
    """
    eager = source.module() if isinstance(source, ExportedProgram) else source
    with limited_threads(getattr(compiled, "threads", None)):
        return _measured(eager, compiled, args, kwargs)


def _measured(
    eager: Callable[..., Any],
    compiled: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> MeasuredLatency:
    times: tuple[list[float], list[float]] = ([], [])
    with torch.no_grad():
        begin = time.perf_counter()
        for model in (eager, compiled):
            model(*args, **kwargs)
        while not times[0] or (
            len(times[0]) < _ROUNDS and time.perf_counter() - begin < _BUDGET_SECONDS
        ):
            for model, seconds in zip((eager, compiled), times, strict=True):
                start = time.perf_counter()
                model(*args, **kwargs)
                seconds.append(time.perf_counter() - start)
    before, after = map(statistics.median, times)
    return MeasuredLatency(before, after, len(times[0]), torch.get_num_threads())
