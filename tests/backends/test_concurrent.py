"""Calls of several threads run at the same time; those that write the model's state take turns."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.backends.conftest import Pair
from tests.support.graphs.lowered import finish

from qfuse import kernels
from qfuse.backends import BackendOptions, CompiledModule, compile_graph
from qfuse.backends.aoti import AotiRunner
from qfuse.ir.errors import OptionsError
from qfuse.ir.graph.stage_graph import LoweredGraph
from qfuse.testing.build import GraphBuilder

aten = torch.ops.aten
SECONDS = 60.0


class Meeting:
    """What the op ``meet`` does: waits until so many threads are in it at the same time."""

    def __init__(self) -> None:
        self.barrier: threading.Barrier | None = None
        self.threads: list[int] = []

    def arrive(self) -> None:
        self.threads.append(torch.get_num_threads())
        if self.barrier is not None:
            self.barrier.wait()


MEETING = Meeting()


@torch.library.custom_op("qfuse_concurrent_tests::meet", mutates_args=())
def _meet(x: torch.Tensor) -> torch.Tensor:
    MEETING.arrive()
    return x.clone()


@_meet.register_fake
def _fake_meet(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def meeting_graph() -> LoweredGraph:
    """``meet(x @ w.t()) + 1``, with an op that is implemented in Python."""
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 4, 16)
    y = b.call(aten.linear.default, x, b.const("weight", torch.eye(16)))
    met = b.call(torch.ops.qfuse_concurrent_tests.meet.default, y)
    return finish(b, [b.call(aten.add.Tensor, met, 1.0)])


@pytest.fixture(params=["aoti", "eager"])
def meeting(
    request: pytest.FixtureRequest, cache_folder: Path, needs_compiler: None
) -> Callable[[int], CompiledModule]:
    """Returns a module that so many threads may run."""
    del needs_compiler
    if not kernels.load().available:
        pytest.skip("needs qfuse's kernels")

    def made(runners: int) -> CompiledModule:
        graph = meeting_graph()
        options = BackendOptions(cache_folder=cache_folder / "meeting", runners=runners)
        runner = compile_graph(graph, backend=request.param, options=options)
        return CompiledModule(graph.signature, runner)

    return made


@pytest.fixture
def together() -> Iterator[Callable[[int], None]]:
    """Makes the op wait for so many threads."""

    def wait_for(count: int) -> None:
        MEETING.barrier = threading.Barrier(count, timeout=SECONDS)

    yield wait_for
    MEETING.barrier = None


def in_threads(count: int, calls: int, run: Callable[[int], object]) -> list[object]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(calls)))


def test_two_threads_are_inside_at_the_same_time(
    meeting: Callable[[int], CompiledModule], together: Callable[[int], None]
) -> None:
    module, x = meeting(2), torch.randn(4, 16)
    together(2)

    results = in_threads(2, 20, lambda _: module(x)[0])

    assert all(torch.equal(got, x + 1) for got in results)  # type: ignore[arg-type]


def test_more_threads_than_runners_wait_outside(
    meeting: Callable[[int], CompiledModule], together: Callable[[int], None]
) -> None:
    module = meeting(2)
    xs = [torch.randn(4, 16) for _ in range(40)]
    together(2)

    results = in_threads(8, 40, lambda i: module(xs[i])[0])

    for got, x in zip(results, xs, strict=True):
        torch.testing.assert_close(got, x + 1)


@pytest.mark.parametrize("meeting", ["aoti"], indirect=True)
def test_one_runner_lets_one_thread_in(
    meeting: Callable[[int], CompiledModule],
) -> None:
    module, x = meeting(1), torch.randn(4, 16)
    MEETING.barrier = threading.Barrier(2, timeout=0.2)
    try:
        with pytest.raises(RuntimeError, match="BrokenBarrierError"):
            in_threads(2, 2, lambda _: module(x))
    finally:
        MEETING.barrier = None
    # What failed has left: others may enter.
    torch.testing.assert_close(module(x)[0], x + 1)


def test_a_call_that_fails_does_not_keep_its_place(
    meeting: Callable[[int], CompiledModule],
) -> None:
    module, x = meeting(2), torch.randn(4, 16)
    MEETING.barrier = threading.Barrier(3)
    MEETING.barrier.abort()
    try:
        for _ in range(5):
            with pytest.raises((RuntimeError, threading.BrokenBarrierError)):
                module(x)
    finally:
        MEETING.barrier = None

    results = in_threads(4, 8, lambda _: module(x)[0])

    assert all(torch.equal(got, x + 1) for got in results)  # type: ignore[arg-type]


@pytest.mark.parametrize("wanted", [1, 2, 5, None])
def test_a_call_uses_so_many_threads(
    meeting: Callable[[int], CompiledModule], wanted: int | None
) -> None:
    module, x = meeting(1), torch.randn(4, 16)
    before = torch.get_num_threads()
    limited = module.with_threads(wanted)
    MEETING.threads.clear()

    limited(x)
    module(x)
    copy.deepcopy(limited)(x)

    assert limited.threads == wanted
    assert MEETING.threads == [wanted or before, before, wanted or before]
    assert torch.get_num_threads() == before


def test_a_call_that_fails_leaves_the_threads_as_they_were(
    meeting: Callable[[int], CompiledModule],
) -> None:
    before = torch.get_num_threads()
    MEETING.barrier = threading.Barrier(2)
    MEETING.barrier.abort()
    try:
        with pytest.raises((RuntimeError, threading.BrokenBarrierError)):
            meeting(1).with_threads(before + 1)(torch.randn(4, 16))
    finally:
        MEETING.barrier = None
    assert torch.get_num_threads() == before


def test_with_threads_shares_weights_state_and_hooks(decode: Pair) -> None:
    calls: list[str] = []
    decode.fast.register_forward_hook(lambda *_: calls.append("hook"))
    limited = decode.fast.with_threads(1)
    inputs = torch.randn(1, 2, 1, 8), torch.tensor([1])

    seen = [run(*inputs, torch.zeros(1, 2, 16, 8))[4] for run in (limited, decode.fast, limited)]

    assert [int(count) for count in seen] == [1, 2, 3]
    assert calls == ["hook"] * 3
    assert limited.runner is decode.fast.runner


def test_refuses_no_threads(projection: Pair) -> None:
    with pytest.raises(OptionsError, match="threads must be a number from 1"):
        projection.fast.with_threads(0)


@pytest.fixture(params=["aoti", "eager", "both"])
def step(request: pytest.FixtureRequest, decode: Pair) -> CompiledModule:
    """A module with state; ``both`` runs every other call op by op, as one of another size."""
    if request.param == "eager":
        return decode.plain
    runner = decode.fast.runner
    assert isinstance(runner, AotiRunner)
    if request.param == "both":
        ways = itertools.cycle((True, False))
        runner._fits = lambda inputs: bool(inputs) and next(ways)  # type: ignore[method-assign]
        runner._conditions = (lambda _: True,)
    return decode.fast


def test_calls_that_write_state_take_turns(step: CompiledModule) -> None:
    q, pos = torch.randn(1, 2, 1, 8), torch.tensor([1])

    seen = in_threads(4, 60, lambda _: step(q, pos, torch.zeros(1, 2, 16, 8))[4])

    assert sorted(int(count) for count in seen) == list(range(1, 61))  # type: ignore[call-overload]


def test_the_last_write_is_part_of_the_turn(decode: Pair) -> None:
    """``left`` and ``right`` are swapped, and written after the code has returned."""
    runner = decode.fast.runner
    assert isinstance(runner, AotiRunner)
    assert runner.plan.late
    buffers = decode.graph.module
    before = {buffers.get_buffer(name).sum().item() for name in ("left", "right")}
    q, pos = torch.randn(1, 2, 1, 8), torch.tensor([1])

    in_threads(4, 40, lambda _: decode.fast(q, pos, torch.zeros(1, 2, 16, 8)))

    assert {buffers.get_buffer(name).sum().item() for name in ("left", "right")} == before


def test_copies_with_their_own_state_do_not_wait_for_each_other(decode: Pair) -> None:
    copies = [copy.deepcopy(decode.fast) for _ in range(3)]
    inputs = torch.randn(1, 2, 1, 8), torch.tensor([1])

    def steps(index: int) -> list[int]:
        run = copies[index]
        return [int(run(*inputs, torch.zeros(1, 2, 16, 8))[4]) for _ in range(20)]

    assert in_threads(3, 3, steps) == [list(range(1, 21))] * 3
    locks = {id(run.runner.otherwise.turn) for run in (*copies, decode.fast)}  # type: ignore[attr-defined]
    assert len(locks) == 4


def test_a_package_without_kernels_runs_one_thread_at_a_time(
    projection: Pair, monkeypatch: pytest.MonkeyPatch, cache_folder: Path
) -> None:
    monkeypatch.setattr("qfuse.backends._inductor_api.is_loaded", lambda: False)
    options = BackendOptions(cache_folder=cache_folder / "projection")
    runner = compile_graph(projection.graph, backend="aoti", options=options)
    module = CompiledModule(replace(projection.graph).signature, runner)
    x, ids = torch.randn(5, 16), torch.randint(0, 10, (5,))
    want = module(x, ids)

    for got in in_threads(4, 40, lambda _: module(x, ids)):
        assert all(map(torch.equal, got, want))  # type: ignore[call-overload]
