"""Measure a machine's speeds in under two seconds, on cores that others may be using too.

What a busy machine does to a measurement: a parallel region waits until the scheduler has given
every thread its slice, so a region of 20 us takes 4 to 12 ms, and a product with several barriers
tens of milliseconds. On one thread the same machine gives undisturbed samples, because somebody
else's slice falls between them or spoils a few. Hence

- what calls cost, and the cache, are measured with operators so small that ATen runs them on the
  calling thread alone;
- everything else is measured with all threads, in regions made long, so that a disturbance costs
  a factor and not an order of magnitude;
- short regions tell whether the machine was quiet. If it was not, all is measured once more on
  one thread, multiplied by the number of threads where that is what threads do, and the better
  of the two numbers is taken. The profile says so.

Probes run in turn, round after round, and the 10th percentile of each is taken.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from qfuse.cost import _torch_api, probes
from qfuse.cost.profile import CostProfile
from qfuse.cost.work import ComputeKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from qfuse.targets import Target

__all__ = ["measure"]

_BUDGET_SECONDS = 1.6
_MAX_ROUNDS = 7
# A region of this length, where nothing disturbs, is shorter than a tenth of it.
_QUIET_SECONDS = 0.5e-3


@dataclass(frozen=True, slots=True)
class _Probes:
    call: probes.Probe
    library_call: probes.Probe
    regions: tuple[probes.Probe, probes.Probe]
    cache: probes.Probe
    memory: probes.Probe
    products: dict[ComputeKind, probes.Products]

    def __iter__(self) -> Iterator[probes.Probe]:
        first, second = self.regions
        yield from (self.call, self.library_call, first, self.cache, self.memory, second)
        for product in self.products.values():
            yield product.many_rows
            if product.one_row is not None:
                yield product.one_row

    def quiet(self) -> bool:
        # The median: single regions get through undisturbed on the busiest machine.
        regions = [seconds for probe in self.regions for seconds in probe.samples]
        return median(regions) < _QUIET_SECONDS


def measure(target: Target, budget: float = _BUDGET_SECONDS) -> CostProfile:
    """Measure this machine with the threads that torch uses now.

    Nothing is left changed: no thread count, no random state, no default, no mode.

    Args:
        target: The machine, as detected in this process.
        budget: Seconds after which no new round starts. One round always runs.

    Returns:
        The profile, with ``quiet`` telling whether it can be trusted in absolute terms.
    """
    start = time.perf_counter()
    with _torch_api.plain_execution():
        run = _sampled(target, budget / 2)
    profile = _profile(target, run)
    if not profile.quiet and target.threads > 1:
        left = start + budget - time.perf_counter()
        alone = _torch_api.on_one_thread(lambda: _profile(target, _sampled(target, left)))
        profile = profile.best_of(_times(alone, min(target.threads, target.usable_cores)))
    elapsed = _rounded(time.perf_counter() - start)
    return replace(profile, measured_seconds=elapsed)


def _times(alone: CostProfile, threads: int) -> CostProfile:
    """What that many threads make of one thread's profile.

    Large products are limited by the cores and scale; one row and memory are limited by what
    the cores share, and are left as they are.
    """
    return replace(
        alone,
        f32_flops=_rounded(alone.f32_flops * threads),
        bf16_flops=_rounded(alone.bf16_flops * threads),
        int8_ops=_rounded(alone.int8_ops * threads),
    )


def _sampled(target: Target, budget: float) -> _Probes:
    """All probes, with as many samples as there is time for."""
    start = time.perf_counter()
    library = target.mkldnn_enabled and target.has_kernel("onednn::qlinear_pointwise")
    run = _Probes(
        call=probes.call_probe(),
        # Too small for a second thread.
        library_call=probes.call_probe(_torch_api.int8_linear(1, 64, 32) if library else None),
        regions=(probes.region_probe(), probes.region_probe()),
        cache=probes.cache_probe(target),
        memory=probes.memory_probe(target),
        products=probes.products(target),
    )
    for _ in range(_MAX_ROUNDS):
        for probe in run:
            probe.sample()
        if time.perf_counter() - start > budget:
            break
    return run


def _profile(target: Target, run: _Probes) -> CostProfile:
    call = 1 / run.call.rate()
    library_call = 1 / run.library_call.rate()
    memory = run.memory.rate()
    rates = {
        kind: _product_rates(product, library_call if kind is ComputeKind.INT8 else call, memory)
        for kind, product in run.products.items()
    }
    # Without any int8 kernel such a product runs expanded, in f32.
    int8 = rates.get(ComputeKind.INT8, rates[ComputeKind.F32])
    return CostProfile(
        machine=target.machine_fingerprint(),
        threads=target.threads,
        memory_bandwidth=_rounded(memory),
        cache_bandwidth=_rounded(max(run.cache.rate(call) * target.threads, memory)),
        cache_bytes=(target.l3_bytes or probes.UNKNOWN_CACHE_BYTES) // 2,
        f32_flops=_rounded(rates[ComputeKind.F32][0]),
        f32_flops_one_row=_rounded(rates[ComputeKind.F32][1]),
        bf16_flops=_rounded(rates[ComputeKind.BF16][0]),
        bf16_flops_one_row=_rounded(rates[ComputeKind.BF16][1]),
        int8_ops=_rounded(int8[0]),
        int8_ops_one_row=_rounded(int8[1]),
        call_seconds=_rounded(call),
        library_call_seconds=_rounded(library_call),
        quiet=target.threads <= target.usable_cores and run.quiet(),
        measured_seconds=0.0,
    )


def _product_rates(product: probes.Products, call: float, memory: float) -> tuple[float, float]:
    """Operations per second with many rows and with one.

    Where no kernel takes one row, one that reads every weight once at the speed of memory, for
    two operations each, stands in.
    """
    many = product.many_rows.rate(call)
    if product.one_row is None:
        one = 2 * memory / product.weight_bytes
    else:
        one = product.one_row.rate(call)
    return many, min(one, many)


def _rounded(value: float) -> float:
    """Three significant digits: more would be noise."""
    return round(value, 2 - math.floor(math.log10(value)))
