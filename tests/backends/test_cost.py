"""What a call costs beyond the compiled code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.backends.conftest import Pair
from tests.support.graphs.lowered import aten, finish

from qfuse.backends import BackendOptions, compile_graph
from qfuse.testing.build import GraphBuilder


def python_calls(work: Callable[[], object]) -> int:
    """How many functions, of Python and of C, one call calls."""
    work()
    count = 0

    def counting(frame: object, event: str, argument: object) -> None:
        nonlocal count
        del frame, argument
        count += event in ("call", "c_call")

    sys.setprofile(counting)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def allocated(work: Callable[[], object]) -> int:
    """How many bytes one call allocates for tensors."""
    work()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        work()
    memory = [e for e in profile.events() if e.name == "[memory]"]
    assert memory
    return sum(max(e.cpu_memory_usage, 0) for e in memory)


@pytest.mark.thorough
@pytest.mark.slow
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
    where = buffer.data_ptr()

    assert allocated(lambda: runner.run(list(inputs))) < buffer.nbytes / 100
    assert buffer.data_ptr() == where
    assert torch.equal(buffer[:, :, 5], inputs[0][:, :, 0])


@pytest.mark.slow
def test_a_call_runs_little_python(projection: Pair) -> None:
    """Binding, guarding and rebuilding, on top of the compiled code itself."""
    runner = projection.fast.runner
    x, ids = torch.randn(2, 16), torch.tensor([1, 2])
    tensors = [x, ids]
    assert runner.backend == "aoti"
    code = python_calls(lambda: runner._entry(tensors))  # type: ignore[attr-defined]
    call = python_calls(lambda: projection.fast(x, ids))
    # 30 and 116 where this was written.
    assert code < call < code + 120
