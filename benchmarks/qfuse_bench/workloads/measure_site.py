"""Measure a merge site: its linears separate and merged, on the same kernels, with cold weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from qfuse.backends import CompiledModule, compile_graph
from qfuse.backends.runner import BackendOptions
from qfuse.cost import Comparison, CostModel
from qfuse.ir.graph.stage_graph import NormalGraph, Signature
from qfuse.kernels import KernelLibrary
from qfuse.lower import lower
from qfuse.lower.kernels.registry import linear_kernels
from qfuse.optimize import optimize
from qfuse.optimize.merge.merge_linears import MergeLinears
from qfuse.rewrite.budget import RewriteBudget
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import RewriteContext
from qfuse.targets import Target
from qfuse_bench.harness.measure import Series, compare, measure
from qfuse_bench.harness.stats import Ratio

DIFFERENCE = 0.05
"""What differs by less than this part is not counted as a difference."""

_NO_MERGING = frozenset({f"optimize/{MergeLinears.name}"})
# Between two uses of a weight lies the rest of a model: so much is read instead.
_LEAST_EVICTED = 64 << 20
# Reading that takes longer than the short calls in between.
_MOST_CALLS = 12


@dataclass(frozen=True, slots=True)
class Measured:
    """The prediction and the measurement of one site.

    Attributes:
        site: What it is.
        kind: How its linears are quantized, and their float type.
        m: Rows of the input.
        k: Input features.
        widths: Output features of each linear.
        predicted: Predicted seconds, separate and merged.
        apart: Times of the separate linears.
        merged: Times of the merged linear.
        count: How many such sites there are.
    """

    site: str
    kind: str
    m: int
    k: int
    widths: tuple[int, ...]
    predicted: Comparison
    apart: Series
    merged: Series
    count: int = 1

    @property
    def decision(self) -> bool:
        """Whether the cost model merges."""
        return self.predicted.loses_nowhere

    @property
    def ratio(self) -> Ratio:
        """Merged over apart: below 1 merging is faster."""
        found = compare(self.merged, self.apart)
        assert found is not None, "both ran in this process"
        return found

    @property
    def counts(self) -> bool:
        """Whether there is a difference to be right about."""
        ratio = self.ratio
        sure = ratio.high < 1 or ratio.low > 1
        return sure and abs(ratio.value - 1) > DIFFERENCE

    @property
    def right(self) -> bool:
        """Whether the decision agrees with the measurement."""
        return self.decision == (self.ratio.value < 1)


class SitePair:
    """The two forms of a site, compiled.

    Args:
        apart: Runs the separate linears.
        merged: Runs the merged linear.
        evict: Empties the caches.
    """

    def __init__(
        self, apart: CompiledModule, merged: CompiledModule, evict: Callable[[], object]
    ) -> None:
        self.forms = {"apart": apart, "merged": merged}
        self._evict = evict

    def run(
        self, inputs: Sequence[torch.Tensor], rounds: int, block_seconds: float
    ) -> tuple[Series, Series]:
        """Time both in interleaved rounds; return them apart and merged."""
        timed = {name: _Cold(form, list(inputs), self._evict) for name, form in self.forms.items()}
        series = measure(timed, rounds, block_seconds=block_seconds)
        return series["apart"], series["merged"]


@dataclass(frozen=True, slots=True)
class _Cold:
    """Times calls whose weights are in no cache, and whose inputs are."""

    call: CompiledModule
    inputs: list[torch.Tensor]
    evict: Callable[[], object]

    def time_block(self, calls: int) -> list[float]:
        """Return the seconds of each of ``calls`` calls, or of fewer if those were very many."""
        seconds = []
        for _ in range(min(calls, _MOST_CALLS)):
            self.evict()
            for tensor in self.inputs:
                tensor.clone()
            begin = time.perf_counter()
            self.call(*self.inputs)
            seconds.append(time.perf_counter() - begin)
        return seconds


@dataclass(frozen=True, slots=True)
class Bench:
    """Compiles sites as qfuse compiles models.

    Attributes:
        target: This machine.
        cost: Predicts the time of sites and kernels.
        kernels: qfuse's own kernels.
        backend: What runs the lowered graphs.
    """

    target: Target
    cost: CostModel
    kernels: KernelLibrary
    backend: str = "auto"

    def pair(self, program: NormalGraph) -> SitePair:
        """Compile both forms of the site that ``program`` is."""
        apart = replace(clone(program), signature=_with_strides(program))
        merged = clone(apart)
        # Without a cost model, every legal merge is done.
        MergeLinears().run(merged, RewriteContext("optimize"))
        waste = torch.zeros(max(_LEAST_EVICTED, 2 * self.target.l3_bytes) // 8, dtype=torch.float64)
        return SitePair(self._compiled(apart), self._compiled(merged), waste.sum)

    def _compiled(self, program: NormalGraph) -> CompiledModule:
        gate = RewriteBudget(banned=_NO_MERGING)
        optimized = optimize(program, RewriteContext("optimize", self.cost, gate))
        kernels = linear_kernels(self.kernels)
        lowered = lower(
            optimized, self.target, self.cost, kernels, RewriteContext("lower", self.cost)
        )
        options = BackendOptions(cache=False)
        runner = compile_graph(lowered, backend=self.backend, options=options)
        return CompiledModule(lowered.signature, runner)


def _with_strides(program: NormalGraph) -> Signature:
    """Return the signature with the strides that results have before anything is rewritten."""
    (leaving,) = program.graph.output_node().args
    assert isinstance(leaving, (tuple, list)), "a graph returns a tuple"
    specs = [
        replace(spec, strides=_strides(node))
        for spec, node in zip(program.signature.outputs, leaving, strict=True)
        if isinstance(node, Node)
    ]
    return replace(program.signature, outputs=tuple(specs))


def _strides(node: Node) -> tuple[int, ...] | None:
    strides = tuple(node.meta["val"].stride())
    return strides if all(isinstance(step, int) for step in strides) else None
