"""The search over rewrites: which of them make a difference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from qfuse.bisection.difference import Differs, largest
from qfuse.bisection.result import Culprit
from qfuse.bisection.run import ExampleCall
from qfuse.ir.events import Lowered
from qfuse.ir.graph.stage_graph import CapturedGraph, LoweredGraph
from qfuse.model_check import bisect_count
from qfuse.options import Check
from qfuse.pipeline import Pipeline
from qfuse.rewrite.budget import RewriteBudget, rule_of

# One wrong rule may fire at many sites, so its second site disables it everywhere.
_MOST = 8


@dataclass(slots=True)
class RewriteSearch:
    """Rewrites and runs one captured graph, with some rewrites left out.

    Attributes:
        pipeline: Rewrites without checks.
        captured: The graph.
        inputs: Its flat inputs.
        call: The call as the user makes it.
        expected: The expected result.
        differs: What a difference is.
        say: Called with a short description of every run.
        runs: How often the graph was rewritten and run.
    """

    pipeline: Pipeline
    captured: CapturedGraph
    inputs: Sequence[torch.Tensor]
    call: ExampleCall
    expected: Any
    differs: Differs
    say: Callable[[str], None]
    runs: int = 0

    @classmethod
    def quiet(cls, pipeline: Pipeline, **given: Any) -> RewriteSearch:
        """Make a search that rewrites as ``pipeline`` does, without its checks."""
        return cls(replace(pipeline, check=Check.OFF, progress=None), **given)

    def rewrite(self, budget: RewriteBudget) -> LoweredGraph:
        """Rewrite the graph within a budget."""
        return self.pipeline.rewrite(self.captured, self.inputs, budget)

    def result_of(self, lowered: LoweredGraph) -> Any:
        """Run a graph; one that cannot run has no result."""
        self.runs += 1
        try:
            return self.call.run_graph(lowered)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            return _Failed(str(error))

    def wrong(self, lowered: LoweredGraph) -> bool:
        """Whether the result of a graph differs, or there is none."""
        result = self.result_of(lowered)
        return isinstance(result, _Failed) or self.differs(result, self.expected)

    def error(self, lowered: LoweredGraph) -> float | None:
        """Return the largest difference of a graph."""
        result = self.result_of(lowered)
        return None if isinstance(result, _Failed) else largest(result, self.expected)

    def find(self, off: frozenset[str]) -> tuple[list[Culprit], frozenset[str]]:
        """Find the rewrites after which the result differs, one by one.

        Args:
            off: Keys that are off anyway.

        Returns:
            The culprits, and the keys that are off with them. Empty if the difference stays
            without any rewrite, and if it is not found after several attempts.
        """
        culprits: list[Culprit] = []
        for _ in range(_MOST):
            budget = self.pipeline.budget(*off)
            lowered = self.rewrite(budget)
            if not self.wrong(lowered):
                return culprits, off
            if self.wrong(self.rewrite(self.pipeline.budget(*off, fuel=0))):
                break
            key = self._first_wrong(budget.allowed, off)
            again = any(rule_of(one.key) == rule_of(key) for one in culprits)
            culprits.append(_culprit(key, budget, lowered))
            off |= {key, rule_of(key)} if again else {key}
        return [], off

    def _first_wrong(self, keys: Sequence[str], off: frozenset[str]) -> str:
        """Return the key of the first rewrite after which the result differs."""
        steps = max(1, len(keys)).bit_length()
        step = 0

        def holds(fuel: int) -> bool:
            nonlocal step
            step += 1
            self.say(f"bisecting {len(keys)} rewrites: step {step} of about {steps}")
            return not self.wrong(self.rewrite(self.pipeline.budget(*off, fuel=fuel)))

        return keys[bisect_count(len(keys), holds) - 1]


def _culprit(key: str, budget: RewriteBudget, lowered: LoweredGraph) -> Culprit:
    place = budget.places[key]
    kernel = ""
    if key.startswith("lower/"):
        events = lowered.log.of(Lowered)
        kernel = next((e.kernel for e in events if e.place.node == place.node), "")
    _, _, rule = rule_of(key).partition("/")
    return Culprit(key, rule, place.op, place.source or place.module, kernel)


@dataclass(frozen=True, slots=True)
class _Failed:
    """A graph that does not run."""

    reason: str
