"""A roofline cost model over a measured profile.

The time of a kernel is the maximum of its compute time and its data movement time, plus its call
overhead. Rules use the model to decide profitability, never legality.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from qfuse.cost.profile import CostProfile
from qfuse.cost.sizes import AtPoints
from qfuse.cost.work import ComputeKind, Work, WorkRange
from qfuse.ir.units import bytes_text, operations_text, rate_text, seconds_text

# Bound on the difference between sums of the same terms in different orders.
_ROUNDING = 1e-9

Workload = Work | WorkRange | Iterable[Work | WorkRange]
"""One kernel, or several in sequence."""


class Bound(StrEnum):
    """The resource that limits a kernel."""

    COMPUTE = "compute"
    MEMORY = "memory"
    CALLS = "calls"


@dataclass(frozen=True, slots=True)
class Estimate:
    """The components of the time of one work, in seconds."""

    compute: float
    memory: float
    calls: float

    @property
    def seconds(self) -> float:
        """The total time: compute and data movement overlap, calls are added."""
        return max(self.compute, self.memory) + self.calls

    @property
    def bound(self) -> Bound:
        """The largest component of the time."""
        if self.calls > max(self.compute, self.memory):
            return Bound.CALLS
        return Bound.COMPUTE if self.compute > self.memory else Bound.MEMORY


@dataclass(frozen=True, slots=True)
class Comparison:
    """Seconds before and after a change, at the smallest, hinted and largest size."""

    before: AtPoints[float]
    after: AtPoints[float]

    @property
    def gain(self) -> float:
        """Seconds saved per call at the hinted size; negative if it loses."""
        return self.before.hint - self.after.hint

    @property
    def loses_nowhere(self) -> bool:
        """Whether it is at least as fast at all three sizes."""
        pairs = zip(self.before.values, self.after.values, strict=True)
        # Equal plans may list their works in another order, and must not lose by the last bit.
        return all(after <= before * (1 + _ROUNDING) for before, after in pairs)

    def __str__(self) -> str:
        """``0.52 ms -> 0.40 ms (1.30x; 1.10x at the smallest size, 1.41x at the largest)``."""
        pairs = zip(self.before.values, self.after.values, strict=True)
        low, hint, high = (before / after if after else 1.0 for before, after in pairs)
        text = f"{seconds_text(self.before.hint)} -> {seconds_text(self.after.hint)} ({hint:.2f}x"
        # Without dynamic sizes the three points are one.
        if self.before.low == self.before.high:
            return f"{text})"
        return f"{text}; {low:.2f}x at the smallest size, {high:.2f}x at the largest)"


@dataclass(frozen=True, slots=True)
class CostModel:
    """Estimates the time of work on the machine of a profile.

    Attributes:
        profile: The measured speeds.
        loops: Whether a compiler makes loops of elementwise ops; without one each op is a call.
    """

    profile: CostProfile
    loops: bool = True

    def estimate(self, work: Work) -> Estimate:
        """Return the time of one work, by component."""
        return Estimate(self._compute(work), self._memory(work), self._calls(work))

    def seconds(self, plan: Workload) -> float:
        """Return the time of a plan at the hinted sizes."""
        return self.seconds_at_points(plan).hint

    def loop_seconds(self, plan: Workload) -> float:
        """Return the time of the parts of a plan that are not calls: compiled loops."""
        return self.seconds([work for work in _ranges(plan) if work.hint.kernel_calls == 0])

    def seconds_at_points(self, plan: Workload) -> AtPoints[float]:
        """Return the time of a plan at the smallest, hinted and largest sizes."""
        columns = zip(*(work.values for work in _ranges(plan)), strict=True)
        sums = [sum(self.estimate(work).seconds for work in column) for column in columns]
        return AtPoints(*sums) if sums else AtPoints(0.0, 0.0, 0.0)

    def compare(self, before: Workload, after: Workload) -> Comparison:
        """Compare the times of two plans."""
        return Comparison(self.seconds_at_points(before), self.seconds_at_points(after))

    def explain(self, work: Work | WorkRange) -> str:
        """Explain the time of one work: ``memory bound: 4.2 MB at 21 GB/s = 0.20 ms``.

        A range is explained at its hint.
        """
        work = work.hint if isinstance(work, AtPoints) else work
        estimate = self.estimate(work)
        total = seconds_text(estimate.seconds)
        calls = f"{work.kernel_calls} call{'' if work.kernel_calls == 1 else 's'}"
        match estimate.bound:
            case Bound.CALLS:
                return f"call bound: {calls} = {total}"
            case Bound.COMPUTE:
                parts = self._compute_text(work)
            case Bound.MEMORY:
                parts = self._memory_text(work)
            case never:
                assert_never(never)
        return f"{estimate.bound} bound: {parts} + {calls} = {total}"

    def _rates(self, kind: ComputeKind) -> tuple[float, float]:
        """Return operations per second with many rows and with one."""
        profile = self.profile
        match kind:
            case ComputeKind.INT8:
                return profile.int8_ops, profile.int8_ops_one_row
            case ComputeKind.BF16:
                return profile.bf16_flops, profile.bf16_flops_one_row
            case ComputeKind.F32 | ComputeKind.NONE:
                return profile.f32_flops, profile.f32_flops_one_row
            case never:
                assert_never(never)

    def _compute(self, work: Work) -> float:
        measured = self.profile.rates_of(work.product)
        if measured is not None and work.one_row_flops:
            rows = work.flops / work.one_row_flops
            return measured.seconds(work.one_row_flops, rows, work.columns)
        # The first row loads and rearranges the weights for all rows, so it has its own rate; with
        # one row only, the estimate is exactly that rate.
        many_rows, one_row = self._rates(work.kind)
        other_rows = work.flops - work.one_row_flops
        return other_rows / many_rows + work.one_row_flops / min(one_row, many_rows)

    def _memory(self, work: Work) -> float:
        cold, cached = self._traffic(work)
        bandwidth = self.profile.memory_bandwidth
        whole = cold / bandwidth + cached / self.profile.cache_bandwidth
        if self.profile.rates_of(work.product) is None or not work.one_row_flops:
            return whole
        # The measured rates are those of weights from memory.
        others = whole - work.weight_bytes / bandwidth
        return min(whole, max(self._compute(work), others))

    def _traffic(self, work: Work) -> tuple[float, float]:
        """Return the bytes moved from or to memory, and those that stay in the cache."""
        activations = (*work.reads, *work.writes)
        cached = sum(size for size in activations if size <= self.profile.cache_bytes)
        return work.weight_bytes + sum(activations) - cached, cached

    def _calls(self, work: Work) -> float:
        plain = work.kernel_calls - work.library_calls
        library = work.library_calls * self.profile.library_call_seconds
        return plain * self.profile.call_seconds + library

    def _compute_text(self, work: Work) -> str:
        rate = work.flops / self._compute(work)
        return f"{operations_text(work.flops)} in {work.kind} at {rate_text(rate, 'OP')}"

    def _memory_text(self, work: Work) -> str:
        cold, cached = self._traffic(work)
        parts = []
        if cold or not cached:
            seconds = self._memory(work) - cached / self.profile.cache_bandwidth
            bandwidth = cold / seconds if seconds else self.profile.memory_bandwidth
            parts.append(f"{bytes_text(cold)} at {rate_text(bandwidth)}")
        if cached:
            inside = rate_text(self.profile.cache_bandwidth)
            parts.append(f"{bytes_text(cached)} in cache at {inside}")
        return " + ".join(parts)


def _ranges(plan: Workload) -> list[WorkRange]:
    works = [plan] if isinstance(plan, (Work, AtPoints)) else plan
    return [work if isinstance(work, AtPoints) else AtPoints(work, work, work) for work in works]
