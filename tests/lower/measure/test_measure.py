"""Products are chosen by measured times: within a budget, once each, and as the report says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.lower.floats.test_choose import W8A8, events, linears, same_values
from torch.utils._python_dispatch import TorchDispatchMode

from qfuse import kernels
from qfuse.cost import CostModel, CostProfile
from qfuse.cost.times import Times
from qfuse.ir.events import Noted
from qfuse.ir.graph.stage_graph import LoweredGraph, NormalGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.lower import FloatPolicy, Measurer, Wishes, lower
from qfuse.lower.kernels.aten_int_mm import INT_MM
from qfuse.lower.kernels.registry import all_kernels
from qfuse.lower.measure import timer
from qfuse.lower.measure.sample import Sample
from qfuse.lower.measure.timer import interleaved_medians
from qfuse.optimize import optimize
from qfuse.report.work import work_share
from qfuse.rewrite.clone import clone
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import QuantizedLinear, per_tensor, per_token

aten = torch.ops.aten
pytestmark = pytest.mark.own_kernels


class Stopwatch:
    """Runs every function once, and gives their times in order; it also is the clock."""

    def __init__(self, *seconds: float, each: float = 1.0) -> None:
        self.seconds = seconds
        self.each = each
        self.now = 0.0
        self.results: list[list[Any]] = []

    def __call__(self, runs: Sequence[Callable[[], object]]) -> list[float]:
        self.results.append([run() for run in runs])
        self.now += self.each
        # The kernels come first, and float last.
        return [*self.seconds[: len(runs) - 1], self.seconds[-1]]

    def clock(self) -> float:
        return self.now


PINNED = CostModel(CostProfile.pinned())


def lowered(
    program: NormalGraph,
    watch: Stopwatch,
    budget: float = 9.0,
    times: Times | None = None,
    cost: CostModel = PINNED,
    isa: str = "avx2",
) -> LoweredGraph:
    measurer = Measurer(budget, watch, watch.clock)
    wishes = Wishes({}, FloatPolicy(), Times() if times is None else times, measurer)
    target = Target.for_testing(isa=isa)
    return lower(optimize(clone(program)), target, cost, all_kernels(kernels.load()), None, wishes)


def notes(low: LoweredGraph) -> list[tuple[str, bool]]:
    return [(note.text, note.warn) for note in low.log.of(Noted)]


@pytest.mark.numeric
def test_the_faster_one_is_taken_whatever_was_predicted() -> None:
    program = linears()
    watch = Stopwatch(9e-4, 8e-4, 1e-4)
    low = lowered(program, watch)
    (event,) = events(low)

    assert (event.kernel, event.measured) == ("float", True)
    assert event.why.startswith("runs in float: measured 0.1")
    assert dict(event.losers)[W8A8].startswith("measured 0.9")
    assert notes(low) == [("the alternatives for 1 products were measured in 1000 ms", False)]
    same_values(program, low)
    # They are the product alone; the epilogue and what surrounds it are predicted.
    kernel, floats = watch.results[0][0], watch.results[0][-1]
    assert kernel.shape == floats.shape == (64, 256)


def test_a_kernel_that_wins_shows_how_slow_float_is() -> None:
    (event,) = events(lowered(linears(), Stopwatch(1e-4, 8e-4, 9e-4)))

    assert (event.kernel, event.measured) == (W8A8, True)
    assert dict(event.losers)["float"].startswith("measured 0.9")


@pytest.mark.parametrize("float_seconds", [1e-4, 9e-4])
def test_the_first_line_has_the_measured_times_of_both(float_seconds: float) -> None:
    low = lowered(linears(), Stopwatch(5e-4, 8e-4, float_seconds))
    (event,) = events(low)
    work = work_share(low.log)

    assert event.measured_float == float_seconds
    assert work is not None
    assert (work.predicted_seconds, work.float_seconds) == (event.predicted, float_seconds)
    assert work.how == "measured"


def test_a_linear_with_the_op_behind_it_has_the_float_time_of_the_linear() -> None:
    b = GraphBuilder()
    block = QuantizedLinear(b, 256, 128)
    y = block.linear(block.quantized(b.arg("x", torch.float32, 64, 128), per_tensor(2)))
    y = b.call(aten.relu.default, y)
    chosen = b.call(ops.choose_qparams, y, "ao-symmetric int8[-128,127] 1x* eps=1e-06 float32 int8")
    scale, zero = b.item(chosen, 0), b.item(chosen, 1)
    q = b.call(ops.quantize, y, scale, zero, str(per_token(2)))
    (event,) = events(lowered(b.done(q, scale, zero), Stopwatch(1e-4, 8e-4, 9e-4)))
    assert "act(relu) -> " in event.what, "both are one kernel"
    assert event.measured_float == 9e-4


def test_equal_products_are_measured_once_and_known_ones_never() -> None:
    times, watch = Times(), Stopwatch(1e-4, 8e-4, 9e-4)
    lowered(linears(3), watch, times=times)
    assert len(watch.results) == len(times.known) == 1

    low = lowered(linears(3), watch, times=times)
    assert len(watch.results) == 1
    assert all(event.measured for event in events(low))
    lowered(linears(rows=32), watch, times=times)
    assert len(watch.results) == 2


@pytest.mark.parametrize(("compiled", "kernel_seconds"), [(True, 7e-5), (False, 1e-4)])
def test_what_python_adds_is_no_part_of_a_compiled_call(
    compiled: bool, kernel_seconds: float
) -> None:
    times = Times()
    profile = replace(CostProfile.pinned(), python_call_seconds=3e-5)
    lowered(linears(), Stopwatch(1e-4, 9e-4), times=times, cost=CostModel(profile, compiled))
    (known,) = times.known.values()

    # Python calls the functions of ATen as cheaply as any operator.
    assert known == pytest.approx({W8A8: kernel_seconds, "float": 9e-4})


def test_python_is_never_all_of_a_time() -> None:
    assert Sample(list, own_calls=2).compiled_seconds(1e-6, 1e-3) == pytest.approx(0.25e-6)
    assert Sample(list, own_calls=0).compiled_seconds(1e-6, 1e-3) == 1e-6


def test_loops_behind_a_kernel_are_not_measured() -> None:
    times, watch = Times(), Stopwatch(1e-4, 2e-4, 9e-4)
    b = GraphBuilder()
    scale = b.arg("scale", torch.float32, 512, 1)
    q = b.call(ops.quantize, b.arg("x", torch.float32, 512, 256), scale, None, str(per_token(2)))
    x = b.call(ops.dequantize, q, scale, None, str(per_token(2)))
    lowered(b.done(QuantizedLinear(b, 256, 256).linear(x)), watch, times=times, isa="avx512_vnni")
    (known,) = times.known.values()

    kinds = dict(zip(known, (result.dtype for result in watch.results[0]), strict=True))
    assert kinds == {W8A8: torch.float32, INT_MM: torch.int32, "float": torch.float32}


class Places(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers where the large operands of every call lie."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = (arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim() > 1)
        self.seen += [tensor.data_ptr() for tensor in tensors]
        return func(*args, **(kwargs or {}))


def test_every_call_takes_its_weight_from_memory() -> None:
    class Twice(Stopwatch):
        def __call__(self, runs: Sequence[Callable[[], object]]) -> list[float]:
            for run in (runs[0], runs[-1]):
                with Places() as before:
                    first = run()
                with Places() as after:
                    second = run()
                assert isinstance(first, torch.Tensor)
                assert isinstance(second, torch.Tensor)
                assert torch.equal(first, second)
                # The activations are where they were.
                assert set(before.seen) & set(after.seen)
                assert set(before.seen) - set(after.seen)
            return super().__call__(runs)

    watch = Twice(1e-4, 8e-4, 9e-4)
    lowered(linears(), watch)

    assert len(watch.results) == 1


def two_sizes() -> NormalGraph:
    """Two linears of different sizes."""
    b = GraphBuilder()
    block = QuantizedLinear(b, 64, 32)
    made = []
    for index, rows in enumerate((16, 48)):
        x = block.quantized(b.arg(f"x{index}", torch.float32, rows, 32), per_tensor(2), f"q{index}")
        made.append(block.linear(x, f"w{index}"))
    return b.done(*made)


def test_over_budget_the_rest_is_predicted() -> None:
    low = lowered(two_sizes(), Stopwatch(1e-4, 8e-4, 9e-4), budget=0.5)

    assert sorted(event.measured for event in events(low)) == [False, True]
    text = "the 0.5 s of measure_seconds are used up: the times of 1 products are predicted"
    assert (text, True) in notes(low)


def test_interrupted_the_rest_is_predicted() -> None:
    class Interrupted(Stopwatch):
        def __call__(self, runs: Sequence[Callable[[], object]]) -> list[float]:
            assert len(runs) > 1
            raise KeyboardInterrupt

    low = lowered(two_sizes(), Interrupted(1.0))

    assert not any(event.measured for event in events(low))
    text = "measuring was interrupted: the times of 2 products are predicted"
    assert notes(low) == [(text, True)]


def test_measuring_leaves_the_graph_as_it_was() -> None:
    program, known = linears(2, shared=True), Times()
    first = lowered(program, Stopwatch(1e-4, 8e-4, 9e-4), times=known)
    again = lowered(program, Stopwatch(1.0), times=known)

    assert [event.kernel for event in events(first)] == [W8A8, W8A8]
    assert to_text(first.graph) == to_text(again.graph)


class Clock:
    """A clock that only calls move, so that counts do not depend on the load of the machine."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []

    def called(self, name: str, seconds: float) -> None:
        self.order.append(name)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    read = SimpleNamespace(thread_time=lambda: made.now, perf_counter=lambda: made.now)
    monkeypatch.setattr(timer, "time", read)
    return made


def test_medians_are_of_interleaved_calls(clock: Clock) -> None:
    seconds = interleaved_medians([partial(clock.called, name, 2.5e-3) for name in "ab"])
    # Two calls each warm up and tell that a sample is one call; nine rounds follow. Calls that do
    # not evict what they need are preceded by one that loads it.
    assert clock.order == ["a", "a", "b", "b", "a", "a", "b", "b", *["a", "b"] * 8]
    assert seconds == pytest.approx([2.5e-3, 2.5e-3])


def test_very_long_calls_are_timed_less_often(clock: Clock) -> None:
    interleaved_medians([partial(clock.called, "long", 0.2), partial(clock.called, "short", 1e-6)])

    assert clock.order.count("long") == 2 + 1 + 3
    assert clock.order.count("short") == 2 + 9 * (1 + 64)


def test_short_calls_are_timed_many_at_once(clock: Clock) -> None:
    seconds = interleaved_medians([partial(clock.called, "a", 1e-6)])

    assert len(clock.order) == 2 + 9 * (1 + 64)
    assert seconds == pytest.approx([1e-6])


def test_the_clock_of_this_machine_runs() -> None:
    (seconds,) = interleaved_medians([lambda: None])
    assert seconds > 0
