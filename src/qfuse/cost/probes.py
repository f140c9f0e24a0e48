"""The microbenchmarks of a profile: one probe per speed."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from qfuse.cost import _torch_api
from qfuse.cost.work import ComputeKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from qfuse.targets import Target

    Clock = Callable[[], float]
    Build = Callable[[int, int, int], Callable[[], object]]
    """Takes rows, depth and columns of a matmul; returns a callable that computes it."""


UNKNOWN_CACHE_BYTES = 8 << 20
# TensorIterator splits work among threads from 32,768 elements (at::internal::GRAIN_SIZE).
_SERIAL_ELEMENTS = 32_767
_REGION_ELEMENTS = 65_536
_CALLS = 20
_COLD_BYTES = (64 << 20, 512 << 20)
# Sizes of the matmuls, and how the rows grow until one takes long enough.
_DEPTH, _COLUMNS = 2048, 1024
_FIRST_ROWS, _ROWS_STEP, _MOST_ROWS = 32, 4, 2048
_LONG_SECONDS = 0.008
_TRIALS = 4
_ONE_ROW_SIDE = 2048
# A run is repeated this often if its clock has run for a smaller part of the time.
_ATTEMPTS, _LEAST_SHARE = 3, 0.5


def timed(prepared: Callable[[], Callable[[], object]], clock: Clock) -> float:
    """Return the seconds of one run, more than zero.

    On a virtual machine, a thread's CPU clock excludes the time that the host has given to others,
    and Linux subtracts it late: the clock may stand still during a later run, which is then timed
    as too short. Such a run is repeated.

    Args:
        prepared: Returns what is timed; not timed itself.
        clock: The clock to time it with.
    """
    longest = passed = 0.0
    for _ in range(_ATTEMPTS):
        run = prepared()
        wall, start = time.perf_counter(), clock()
        run()
        seconds, passed = clock() - start, time.perf_counter() - wall
        if seconds > _LEAST_SHARE * passed:
            return seconds
        longest = max(longest, seconds)
    # Each run may have been interrupted, which the clock is right to exclude.
    return longest or passed


@dataclass(slots=True)
class Probe:
    """A benchmark: ``amount`` units of work in ``calls`` operator calls per sample.

    Attributes:
        repeats: Samples per round. If there are several, a warm-up run before them refills the
            caches, which the previous probe has evicted.
        clock: Wall-clock time, or CPU time of this thread.
        cpu_seconds: CPU time of all threads of the process during the samples.
    """

    run: Callable[[], object]
    amount: float = 1.0
    calls: int = 1
    repeats: int = 3
    clock: Clock = time.perf_counter
    samples: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0

    def sample(self) -> None:
        """Run and time it, and accumulate the CPU time of all threads of the process."""
        if self.repeats > 1:
            self.run()
        for _ in range(self.repeats):
            cpu = time.process_time()
            self.samples.append(timed(lambda: self.run, self.clock))
            self.cpu_seconds += time.process_time() - cpu

    def seconds(self) -> float:
        """The 10th percentile of the samples."""
        ordered = sorted(self.samples)
        return ordered[len(ordered) // 10]

    def rate(self, seconds_per_call: float = 0.0) -> float:
        """Return units per second without call overhead (at most half of the time)."""
        seconds = self.seconds()
        return self.amount / (seconds - min(self.calls * seconds_per_call, seconds / 2))


@dataclass(frozen=True, slots=True)
class Products:
    """Matmuls in one arithmetic: with many rows, and with one if that is supported."""

    many_rows: Probe
    one_row: Probe | None
    weight_bytes: int

    def __iter__(self) -> Iterator[Probe]:
        yield self.many_rows
        if self.one_row is not None:
            yield self.one_row


def call_probe(call: Callable[[], object] | None = None) -> Probe:
    """Return the probe of a trivial operator call, by default an ATen one."""
    if call is None:
        value = torch.zeros(1, dtype=torch.float32, device="cpu")
        result = torch.zeros(1, dtype=torch.float32, device="cpu")
        return call_probe(lambda: torch.add(value, value, out=result))

    def run() -> None:
        for _ in range(_CALLS):
            call()

    # The thread's own clock stops while another process has the core.
    return Probe(run, float(_CALLS), _CALLS, clock=time.thread_time)


def region_probe() -> Probe:
    """Return the probe of the smallest work that is split among threads."""
    data = torch.zeros(_REGION_ELEMENTS, dtype=torch.float32, device="cpu")
    return Probe(lambda: data.add_(1))


def cache_probe(target: Target) -> Probe:
    """Return a probe that reads a quarter of the last-level cache on this thread, in pieces."""
    size = (target.l3_bytes or UNKNOWN_CACHE_BYTES) // 4
    count = max(1, size // (_SERIAL_ELEMENTS * 8))
    data = torch.ones(count * _SERIAL_ELEMENTS, dtype=torch.float64, device="cpu")
    # One sum over all of it would be split among threads.
    pieces = torch.split(data, _SERIAL_ELEMENTS)
    result = torch.zeros((), dtype=torch.float64, device="cpu")

    def run() -> None:
        for piece in pieces:
            torch.sum(piece, dim=0, out=result)

    return Probe(run, float(data.nbytes), len(pieces), clock=time.thread_time)


def memory_probe(target: Target, clock: Clock) -> Probe:
    """Return a probe that reads more than the caches hold."""
    least, most = _COLD_BYTES
    # Of four times the cache, at most a quarter is left from the last round.
    size = min(max(least, 4 * target.l3_bytes), most, max(least, _free_memory() // 4))
    data = torch.ones(size // 8, dtype=torch.float64, device="cpu")
    return Probe(lambda: torch.sum(data), float(data.nbytes), repeats=1, clock=clock)


def _free_memory() -> int:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 0


def products(target: Target, clock: Clock) -> dict[ComputeKind, Products]:
    """Return the matmuls of each arithmetic; int8 is absent without a kernel for it.

    That of int8 is qfuse's own kernel if it is loaded, with the instruction set that it uses.

    Args:
        target: Determines the available kernels.
        clock: The clock to time them with.
    """
    found = {
        ComputeKind.F32: _products(_float_linear(torch.float32), 4, clock),
        ComputeKind.BF16: _products(_float_linear(torch.bfloat16), 2, clock),
    }
    # On each instruction set, other kernels than those that would run have other speeds.
    if _torch_api.kernels_in_use():
        found[ComputeKind.INT8] = _products(_torch_api.own_int8_linear, 1, clock)
    elif target.mkldnn_enabled and target.has_kernel("onednn::qlinear_pointwise"):
        found[ComputeKind.INT8] = _products(_torch_api.int8_linear, 1, clock)
    elif target.has_kernel("aten::_int_mm"):
        # Wrong for one row: see qfuse.targets.doctor.
        many = _many_rows(_torch_api.int8_matmul, clock)
        found[ComputeKind.INT8] = Products(many, None, 1)
    return found


def _products(build: Build, width: int, clock: Clock) -> Products:
    run = build(1, _ONE_ROW_SIDE, _ONE_ROW_SIDE)
    one_row = Probe(run, 2.0 * _ONE_ROW_SIDE**2, clock=clock)
    return Products(_many_rows(build, clock), one_row, width)


def _float_linear(dtype: torch.dtype) -> Build:
    def build(rows: int, depth: int, columns: int) -> Callable[[], object]:
        left = torch.ones(rows, depth, dtype=dtype, device="cpu")
        weight = torch.ones(columns, depth, dtype=dtype, device="cpu")
        return lambda: functional.linear(left, weight)

    return build


def _many_rows(build: Build, clock: Clock) -> Probe:
    """Return a long enough matmul; its rows grow in steps, so that a slow one stops early."""
    rows = _FIRST_ROWS
    while True:
        amount = 2.0 * rows * _DEPTH * _COLUMNS
        # A long matmul warms its own caches, so it needs no run before the timed one.
        probe = Probe(build(rows, _DEPTH, _COLUMNS), amount, repeats=1, clock=clock)
        if rows >= _MOST_ROWS or _takes_long(probe):
            return probe
        rows *= _ROWS_STEP


def _takes_long(probe: Probe) -> bool:
    """Whether the best of a few runs is long enough; the first run includes setup."""
    for _ in range(_TRIALS):
        probe.sample()
        # A trial of the size and no measurement: the sample is dropped.
        if probe.samples.pop() < _LONG_SECONDS:
            return False
    return True
