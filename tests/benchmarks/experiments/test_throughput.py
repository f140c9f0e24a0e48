"""Streams divide the cores evenly, and every call of every stream is counted."""

from __future__ import annotations

import threading

import pytest
import torch
from rich.console import Console

import qfuse
from qfuse.ir.errors import OptionsError
from qfuse_bench.experiments.throughput import (
    Streams,
    ThroughputOptions,
    arrangements,
    measure_streams,
    run_throughput,
)


@pytest.mark.parametrize(
    ("cores", "names"),
    [(1, ["1x1"]), (2, ["1x2", "2x1"]), (6, ["1x6", "2x3", "3x2", "6x1"])],
)
def test_arrangements_use_all_cores(cores: int, names: list[str]) -> None:
    assert [str(streams) for streams in arrangements(cores)] == names


def test_every_call_of_every_stream_is_counted() -> None:
    seen: list[int] = []

    class Noted(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    options = {"backend": "eager", "own_kernels": False}
    fast = qfuse.compile(Noted(), (torch.ones(3),), check="off", options=options)
    fast.register_forward_hook(lambda *_: seen.append(threading.get_ident()))

    rate, latencies = measure_streams(fast, ((torch.ones(3),), {}), Streams(3, 1), 0.02)

    assert rate > 0
    assert len(set(seen)) == 3
    assert len(seen) == len(latencies) + 3 * 3


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"seconds": 0.0}])
def test_refuses_to_measure_nothing(wrong: dict[str, float]) -> None:
    with pytest.raises(OptionsError, match="cannot be measured"):
        run_throughput(ThroughputOptions(**wrong), Console())  # type: ignore[arg-type]
