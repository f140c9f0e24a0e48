"""What a call costs beyond the compiled code."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.backends.conftest import Pair
from tests.support.graphs.lowered import aten, finish

from qfuse.backends import BackendOptions, compile_graph
from qfuse.testing.build import GraphBuilder


def seconds(work: Callable[[], object], repeat: int, rounds: int = 7) -> float:
    """The least processor time that one call takes; other processes do not count."""
    work()
    times = []
    for _ in range(rounds):
        begin = time.thread_time()
        for _ in range(repeat):
            work()
        times.append((time.thread_time() - begin) / repeat)
    return min(times)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Processor time of one thread is all of it only if there is one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_decode_step_does_not_copy_the_cache(cache_folder: Path, needs_compiler: None) -> None:
    del needs_compiler
    b = GraphBuilder()
    q = b.arg("q", torch.float32, 1, 8, 1, 64)
    pos = b.arg("pos", torch.int64, 1)
    cache = b.const("cache", torch.zeros(1, 8, 8192, 64))
    new = b.call(aten.index_put.default, cache, [None, None, pos], q)
    maximum = b.call(aten.amax.default, b.call(aten.slice.Tensor, new, 2, 0, 16), [-1])
    graph = finish(b, [maximum], [("cache", new)])
    runner = compile_graph(
        graph, backend="aoti", options=BackendOptions(cache_folder=cache_folder / "cost")
    )
    inputs = [torch.randn(1, 8, 1, 64), torch.tensor([5])]
    buffer = graph.module.get_buffer("cache")
    other = torch.empty_like(buffer)

    step = seconds(lambda: runner.run(list(inputs)), 20)
    copy = seconds(lambda: other.copy_(buffer), 5)
    assert step < copy / 10
    assert torch.equal(buffer[:, :, 5], inputs[0][:, :, 0])


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_call_costs_microseconds(projection: Pair) -> None:
    """Binding, guarding and rebuilding, on top of the compiled code itself."""
    runner = projection.fast.runner
    x, ids = torch.randn(2, 16), torch.tensor([1, 2])
    tensors = [x, ids]
    assert runner.backend == "aoti"
    code = seconds(lambda: runner._entry(tensors), 2000)  # type: ignore[attr-defined]
    call = seconds(lambda: projection.fast(x, ids), 2000)
    # 12 us where this was written; the bound leaves room for slower machines.
    assert call - code < 40e-6
