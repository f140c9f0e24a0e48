"""Measuring for real, once; what it gives must be possible, and nothing may be left changed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from qfuse.cost import ComputeKind, CostProfile, _torch_api, measure, probes
from qfuse.cost.measurement import _Basics, _rounded
from qfuse.cost.probes import Probe
from qfuse.ir.errors import OptionsError
from qfuse.targets import KernelState, Target

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.detect(extensions=False)


@pytest.fixture(scope="module")
def measured(target: Target) -> CostProfile:
    return measure(target)


def test_what_is_measured_is_possible(target: Target, measured: CostProfile) -> None:
    assert measured.machine == target.machine_fingerprint()
    assert measured.threads == target.threads
    assert measured.measured_seconds > 0
    # From a very slow to a very fast machine; a wrong unit or a missing factor falls outside.
    assert 5e8 < measured.memory_bandwidth < 5e12
    assert measured.memory_bandwidth <= measured.cache_bandwidth < 1e14
    assert 1e9 < measured.f32_flops < 1e14
    assert 1e-8 < measured.call_seconds < 1e-3
    assert measured.call_seconds <= measured.library_call_seconds < 1e-2


def test_one_row_is_not_faster_than_many(measured: CostProfile) -> None:
    assert measured.f32_flops_one_row <= measured.f32_flops
    assert measured.bf16_flops_one_row <= measured.bf16_flops
    assert measured.int8_ops_one_row <= measured.int8_ops


@pytest.mark.isa("vnni")
def test_int8_dot_products_pay(target: Target, measured: CostProfile) -> None:
    if not target.has_kernel("onednn::qlinear_pointwise"):
        pytest.skip("needs oneDNN's quantized linear")

    assert measured.int8_ops > measured.f32_flops


def settings() -> dict[str, Any]:
    """What measuring might change."""
    seen: list[int] = []
    fresh = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    fresh.start()
    fresh.join()
    return {
        "threads": torch.get_num_threads(),
        "threads of a new thread": seen,
        "random": torch.random.get_rng_state().tolist(),
        "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "mkldnn": torch.backends.mkldnn.enabled,
    }


def test_nothing_is_left_changed(target: Target) -> None:
    before = settings()
    measure(target, budget=0)

    assert settings() == before


def test_without_a_budget_the_first_rounds_run(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Probe] = []
    original = probes.call_probe

    def remembered(*args: Any) -> Probe:
        built.append(original(*args))
        return built[-1]

    monkeypatch.setattr(probes, "call_probe", remembered)
    measure(target, budget=0)

    assert {len(probe.samples) for probe in built} == {3 * 3}


def test_modes_of_the_caller_do_not_matter(target: Target) -> None:
    profiles: list[CostProfile] = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        profiles.append(measure(target, budget=0))
        return x + 1

    with torch.autocast("cpu"), torch.device("meta"):
        graph = make_fx(traced, tracing_mode="fake")(torch.ones(2, device="cpu")).graph

    assert [node.op for node in graph.nodes] == ["placeholder", "call_function", "output"]
    # A fake product takes no time: its rate would be far beyond any machine's.
    assert 1e9 < profiles[0].f32_flops < 1e14


def test_a_noisy_machine_is_measured_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    clocks: list[Any] = []
    original = probes.products

    def remembered(target: Target, clock: Any) -> dict[ComputeKind, probes.Products]:
        counts.append(torch.get_num_threads())
        clocks.append(clock)
        return original(target, clock)

    monkeypatch.setattr("qfuse.cost.measurement._QUIET_SECONDS", 0.0)
    monkeypatch.setattr(probes, "products", remembered)
    profile = measure(Target.for_testing(threads=2), budget=0)

    assert counts == [1]
    assert clocks == [time.thread_time]
    assert not profile.quiet


def test_a_torch_without_openmp_measures_all_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks: list[object] = []
    original = probes.products

    def remembered(target: Target, clock: Any) -> dict[ComputeKind, probes.Products]:
        clocks.append(clock)
        return original(target, clock)

    def missing() -> None:
        raise OptionsError("threads cannot be set: torch does not use OpenMP here")

    monkeypatch.setattr("qfuse.targets.threads._runtime", missing)
    monkeypatch.setattr("qfuse.cost.measurement._QUIET_SECONDS", 0.0)
    monkeypatch.setattr(probes, "products", remembered)
    profile = measure(Target.for_testing(threads=2), budget=0)

    assert clocks == [time.perf_counter]
    assert not profile.quiet


def busy(seconds: float) -> None:
    """Keep this thread running for so long."""
    start = time.thread_time()
    while time.thread_time() - start < seconds:
        pass


def test_waiting_for_a_core_is_noticed() -> None:
    def region(run: Callable[[], None], seconds: float) -> _Basics:
        short = Probe(lambda: None, samples=[seconds])
        long.append(Probe(run, repeats=1))
        long[-1].sample()
        return _Basics(short, short, short, (short, short), short, long[-1])

    long: list[Probe] = []
    # One thread that runs is quiet for one thread, but not if two should have.
    runs = region(lambda: busy(0.05), 1e-5)
    # What somebody else's slice does to a thread: time passes and it does not run.
    waits = region(lambda: time.sleep(0.05), 1e-5)
    # Short regions that take as long as a slice give it away as well.
    slow = region(lambda: busy(0.05), 8e-3)

    assert long[0].cpu_seconds >= 0.05
    # As if nobody had interrupted these two.
    for probe in (long[0], long[2]):
        probe.samples = [probe.cpu_seconds]
    assert runs.quiet([long[0]], 1)
    assert not runs.quiet([long[0]], 2)
    assert not waits.quiet([long[1]], 1)
    assert not slow.quiet([long[2]], 1)


def test_more_threads_than_cores_are_never_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Basics, "quiet", lambda *_: True)

    assert not measure(Target.for_testing(threads=2, usable_cores=1), budget=0).quiet
    assert measure(Target.for_testing(threads=2, usable_cores=2), budget=0).quiet


def test_int8_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch_api, "kernels_in_use", lambda: "")
    target = Target.for_testing(
        threads=1, kernels={"onednn::qlinear_pointwise": KernelState.ABSENT}
    )
    found = probes.products(target, time.perf_counter)
    assert found[ComputeKind.INT8].one_row is None

    profile = measure(target, budget=0)

    # Two operations per weight, at the speed of memory and not beyond.
    assert profile.int8_ops_one_row <= profile.int8_ops
    assert 0 < profile.int8_ops_one_row <= 2.02 * profile.memory_bandwidth
    assert profile.library_call_seconds > 0


def test_without_any_int8_kernel_int8_is_as_fast_as_f32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch_api, "kernels_in_use", lambda: "")
    target = Target.for_testing(
        threads=1,
        mkldnn_enabled=False,
        kernels={"aten::_int_mm": KernelState.SCHEMA_ONLY},
    )

    profile = measure(target, budget=0)

    assert (profile.int8_ops, profile.int8_ops_one_row) == (
        profile.f32_flops,
        profile.f32_flops_one_row,
    )


def test_products_grow_until_they_are_long() -> None:
    now = 0.0
    built: list[int] = []

    def clock() -> float:
        return now

    def build(rows: int, depth: int, columns: int) -> Any:
        del depth, columns
        built.append(rows)

        def run() -> None:
            nonlocal now
            now += rows * 1e-4  # 10 ms for a hundred rows

        return run

    probe = probes._many_rows(build, clock)

    assert built == [32, 128]
    assert probe.samples == []
    assert probe.amount == 2 * 128 * 2048 * 1024


def test_one_slow_run_does_not_stop_the_growing() -> None:
    now, runs = 0.0, 0

    def build(rows: int, depth: int, columns: int) -> Any:
        del rows, depth, columns

        def run() -> None:
            nonlocal now, runs
            runs += 1
            now += 1e-3 if runs % 3 == 0 else 1.0

        return run

    assert probes._many_rows(build, lambda: now).amount == 2 * 2048 * 2048 * 1024


def test_a_sample_and_its_rate() -> None:
    now, runs = 0.0, 0

    def run() -> None:
        nonlocal now, runs
        runs += 1
        now += float(runs)

    warm = Probe(run, amount=100.0, calls=2, repeats=3, clock=lambda: now)
    warm.sample()
    assert warm.samples == [2.0, 3.0, 4.0]
    assert warm.seconds() == 2.0
    assert warm.rate() == 50.0
    assert warm.rate(0.25) == pytest.approx(100 / 1.5)
    # Calls are never more than half of the time: a rate stays finite.
    assert warm.rate(10.0) == 100.0

    cold = Probe(run, repeats=1, clock=lambda: now)
    cold.sample()
    assert cold.samples == [5.0]


class LateClock:
    """A clock of CPU time that stands still while it is charged for stolen time.

    Args:
        seconds: By how much it advances in each run.
    """

    def __init__(self, *seconds: float) -> None:
        self.now, self.left = 0.0, list(seconds)

    def __call__(self) -> float:
        return self.now

    def run(self) -> None:
        time.sleep(1e-3)
        self.now += self.left.pop(0)


@pytest.mark.parametrize(
    ("seconds", "sampled"),
    [
        ((0.0, 1.0, 2.0), 1.0),
        ((1e-9, 0.0, 2.0), 2.0),
        # Interrupted each time.
        ((1e-7, 1e-4, 1e-6), 1e-4),
    ],
    ids=str,
)
def test_a_clock_that_stood_still_is_not_believed(
    seconds: tuple[float, ...], sampled: float
) -> None:
    clock = LateClock(*seconds)
    probe = Probe(clock.run, repeats=1, clock=clock)
    probe.sample()

    assert probe.samples == [pytest.approx(sampled)]


def test_a_clock_that_does_not_run_gives_the_time_that_passed() -> None:
    clock = LateClock(0.0, 0.0, 0.0)
    probe = Probe(clock.run, repeats=1, clock=clock)
    probe.sample()

    assert 1e-3 <= probe.seconds() < 1.0
    assert probe.rate() > 1.0


def test_the_tenth_percentile() -> None:
    probe = Probe(lambda: None, samples=[float(n) for n in range(20, 0, -1)])

    assert probe.seconds() == 3.0


@pytest.mark.parametrize(
    ("value", "rounded"), [(123456.0, 123000.0), (0.0012345, 0.00123), (9.999, 10.0), (1.0, 1.0)]
)
def test_three_digits(value: float, rounded: float) -> None:
    assert _rounded(value) == rounded
