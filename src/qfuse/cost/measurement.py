"""Measures a machine's speeds in under two seconds, even under background load.

Background load distorts measurements: a parallel region waits until the scheduler has given every
thread its slice, so a region of 20 us takes 4 to 12 ms, and a matmul with several barriers tens of
milliseconds. A single thread is only interrupted, and its CPU clock stops meanwhile. Hence

- call overhead and cache bandwidth are measured with operators so small that ATen runs them on the
  calling thread alone, by that thread's clock;
- matmuls and memory are measured with all threads, and the machine is checked to be quiet: short
  parallel regions are short, and in long ones no thread waits for a core;
- otherwise they are measured on one thread by its own clock, and multiplied by the number of
  threads where work scales with threads. The profile records this.

Probes run round-robin, and the 10th percentile of each is used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median

from qfuse.cost import _torch_api, probes
from qfuse.cost.product_probes import ProbedProduct, product_rates
from qfuse.cost.profile import CostProfile
from qfuse.cost.rates import ProductRates
from qfuse.cost.work import ComputeKind
from qfuse.targets import Target, can_limit_threads, limited_threads

_BUDGET_SECONDS = 1.2
_FIRST_ROUNDS = 3
_MAX_ROUNDS = 7
# On a quiet machine, the short region takes less than a tenth of this.
_QUIET_SECONDS = 0.5e-3
# Threads with a core each run during a whole long region, or wait for others actively.
_QUIET_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class _Basics:
    """The measurements that do not depend on whether the machine is quiet."""

    call: probes.Probe
    library_call: probes.Probe
    own_call: probes.Probe
    regions: tuple[probes.Probe, probes.Probe]
    cache: probes.Probe
    memory: probes.Probe

    def __iter__(self) -> Iterator[probes.Probe]:
        first, second = self.regions
        yield from (self.call, self.library_call, self.own_call)
        yield from (first, self.cache, self.memory, second)

    def quiet(self, long: Iterable[probes.Probe], threads: int) -> bool:
        """Whether the cores were free of other load, judged by the short and some long regions."""
        # The median, because single regions may be undisturbed even on a busy machine.
        regions = [seconds for probe in self.regions for seconds in probe.samples]
        run = sum(probe.cpu_seconds for probe in long)
        passed = sum(sum(probe.samples) for probe in long)
        return median(regions) < _QUIET_SECONDS and run > _QUIET_SHARE * threads * passed

    def seconds_per_call(self, probed: ProbedProduct) -> float:
        """Return the overhead of a call of a product's kernels."""
        if probed.own:
            return 1 / self.own_call.rate()
        return 1 / (self.library_call if probed.library else self.call).rate()


@dataclass(frozen=True, slots=True)
class _Speeds:
    """The speeds measured with all threads, or extrapolated from one.

    Attributes:
        memory: Bytes per second.
        rates: Operations per second of each arithmetic, with many rows and with one.
        products: Those of products by number of rows, with weights in memory.
        long: The probes whose regions are long.
    """

    memory: float
    rates: dict[ComputeKind, tuple[float, float]]
    products: list[ProductRates]
    long: list[probes.Probe]

    def times(self, threads: int, memory: float) -> _Speeds:
        """Extrapolate to a number of threads that together read ``memory`` B/s.

        Large matmuls are limited by the cores and scale. A matmul with one row is limited by shared
        resources and does not; those with weights from memory scale up to its bandwidth.
        """
        together = max(self.memory, memory)
        rates = {kind: (many * threads, one) for kind, (many, one) in self.rates.items()}
        products = [one.times(threads, together) for one in self.products]
        return _Speeds(together, rates, products, self.long)


def measure(target: Target, budget: float = _BUDGET_SECONDS) -> CostProfile:
    """Measure this machine with torch's current number of threads.

    All global state is restored: thread count, random state, defaults and modes.

    Args:
        target: The machine, as detected in this process.
        budget: Seconds after which no new round starts. The first rounds always run.

    Returns:
        The profile; ``quiet`` tells whether its absolute values are reliable.
    """
    start = time.perf_counter()
    cores = min(target.threads, target.usable_cores)
    with _torch_api.plain_execution():
        basics = _basics(target)
        _sample(basics, _FIRST_ROUNDS)
        # With more threads than cores they wait for each other, whatever else runs.
        quiet = target.threads == cores and basics.quiet([basics.memory], cores)
        speeds = None
        if quiet and cores > 1:
            speeds = _speeds(target, basics, start + budget, alone=False)
            # Other load may have started during the long part of the measurement.
            quiet = basics.quiet(speeds.long, cores)
    if not quiet or speeds is None:
        # At least one round runs, even if the first attempt has used up the budget.
        deadline = max(start + budget, time.perf_counter())
        # Without OpenMP all threads of torch run, so what they reach together is measured.
        alone = can_limit_threads()
        with _torch_api.plain_execution(), limited_threads(1 if alone else None):
            speeds = _speeds(target, basics, deadline, alone=alone)
        if alone:
            speeds = speeds.times(cores, basics.memory.rate())
    return _profile(target, basics, speeds, quiet=quiet, start=start)


def _basics(target: Target) -> _Basics:
    library = target.mkldnn_enabled and target.has_kernel("onednn::qlinear_pointwise")
    own = bool(_torch_api.kernels_in_use())
    return _Basics(
        call=probes.call_probe(),
        # Too small to be split among threads.
        library_call=probes.call_probe(_torch_api.int8_linear(1, 64, 32) if library else None),
        own_call=probes.call_probe(_torch_api.own_int8_linear(1, 64, 32) if own else None),
        regions=(probes.region_probe(), probes.region_probe()),
        cache=probes.cache_probe(target),
        memory=probes.memory_probe(target, time.perf_counter),
    )


def _sample(probed: Iterable[probes.Probe], rounds: int, deadline: float = math.inf) -> None:
    listed = list(probed)
    for _ in range(rounds):
        for probe in listed:
            probe.sample()
        if time.perf_counter() > deadline:
            break


def _speeds(target: Target, basics: _Basics, deadline: float, *, alone: bool) -> _Speeds:
    """Sample memory and the matmuls of each arithmetic."""
    clock = time.thread_time if alone else time.perf_counter
    memory = probes.memory_probe(target, clock) if alone else basics.memory
    products = probes.products(target, clock)
    listed = [memory, *(probe for product in products.values() for probe in product)]
    # Also sample the probes that show whether the machine stays quiet.
    _sample([*listed, *([] if alone else basics.regions)], _MAX_ROUNDS, deadline)
    # The cost of a call is a term of its own in the model, so the rates exclude it.
    call, library_call = 1 / basics.call.rate(), 1 / basics.library_call.rate()
    int8_call = 1 / basics.own_call.rate() if _torch_api.kernels_in_use() else library_call
    rates = {
        kind: _product_rates(
            product, int8_call if kind is ComputeKind.INT8 else call, memory.rate()
        )
        for kind, product in products.items()
    }
    long = [memory, *(product.many_rows for product in products.values())]
    found = product_rates(
        target,
        clock,
        basics.seconds_per_call,
        # The machine has to stay quiet meanwhile too.
        between=lambda: _sample([] if alone else basics.regions, _MAX_ROUNDS),
        deadline=deadline,
    )
    return _Speeds(memory.rate(), rates, found, long)


def _profile(
    target: Target, basics: _Basics, speeds: _Speeds, *, quiet: bool, start: float
) -> CostProfile:
    call = 1 / basics.call.rate()
    memory = speeds.memory
    rates = speeds.rates
    f32, bf16 = rates[ComputeKind.F32], rates[ComputeKind.BF16]
    # Without an int8 kernel, int8 matmuls are expanded to f32.
    int8 = rates.get(ComputeKind.INT8, f32)
    return CostProfile(
        machine=target.machine_fingerprint(),
        threads=target.threads,
        memory_bandwidth=_rounded(memory),
        # A cache is never slower than memory, whatever noise has measured.
        cache_bandwidth=_rounded(max(basics.cache.rate(call) * target.threads, memory)),
        cache_bytes=(target.l3_bytes or probes.UNKNOWN_CACHE_BYTES) // 2,
        f32_flops=_rounded(f32[0]),
        f32_flops_one_row=_rounded(f32[1]),
        bf16_flops=_rounded(bf16[0]),
        bf16_flops_one_row=_rounded(bf16[1]),
        int8_ops=_rounded(int8[0]),
        int8_ops_one_row=_rounded(int8[1]),
        call_seconds=_rounded(call),
        library_call_seconds=_rounded(1 / basics.library_call.rate()),
        quiet=quiet,
        measured_seconds=_rounded(time.perf_counter() - start),
        products=tuple(one.rounded(_rounded) for one in speeds.products),
        python_call_seconds=_rounded(max(1 / basics.own_call.rate(), call) - call),
    )


def _product_rates(product: probes.Products, call: float, memory: float) -> tuple[float, float]:
    """Return operations per second with many rows and with one.

    If no kernel supports one row, assume one that reads every weight once at memory bandwidth,
    with two operations each.
    """
    many = product.many_rows.rate(call)
    if product.one_row is None:
        one = 2 * memory / product.weight_bytes
    else:
        one = product.one_row.rate(call)
    return many, min(one, many)


def _rounded(value: float) -> float:
    """Round to three significant digits, since more would be noise."""
    if not value:
        return value
    return round(value, 2 - math.floor(math.log10(value)))
