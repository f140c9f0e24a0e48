"""The road through the five rooms, in a straight line. Read this first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Interpreter

from qfuse.ir.events import Checked, Exactness, RolledBack
from qfuse.ir.verify import verify
from qfuse.lower import lower
from qfuse.lower.rows import kernel_rows
from qfuse.model_check import ModelCheck, bisect
from qfuse.normalize import normalize
from qfuse.optimize import optimize
from qfuse.options import Check
from qfuse.rewrite.clone import clone
from qfuse.rewrite.driver import Context
from qfuse.rewrite.gate import Gate
from qfuse.rewrite.site_check import SiteChecker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from qfuse.cost.model import CostModel
    from qfuse.ir.program import CapturedGraph, LoweredGraph
    from qfuse.kernels import KernelLibrary
    from qfuse.rewrite.compare import Verdict
    from qfuse.targets.target import Target

__all__ = ["Planner", "Progress"]

Progress = "Callable[[str], None]"
"""Called with a word about what begins."""

_ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class Planner:
    """Takes a captured graph to a lowered one.

    Attributes:
        target: Where it will run.
        cost: Prices rewrites and kernels.
        kernels: qfuse's own compiled kernels, or why there are none.
        check: How values are checked.
        progress: Told what begins.
    """

    target: Target
    cost: CostModel
    kernels: KernelLibrary
    check: Check
    progress: Callable[[str], None]

    def rewrite(
        self, captured: CapturedGraph, inputs: Sequence[torch.Tensor], gate: Gate
    ) -> LoweredGraph:
        """Take a copy of ``captured`` through normalize, optimize and lower."""
        program = clone(captured)
        verify(program)
        checker = SiteChecker(program, inputs) if self.check is Check.SITE else None

        def context(room: str) -> Context:
            return Context(room, self.cost, gate, checker)

        normal = normalize(program, context("normalize"))
        optimized = optimize(normal, context("optimize"))
        rows = kernel_rows(self.kernels)
        return lower(optimized, self.target, self.cost, rows, context("lower"))

    def plan(self, captured: CapturedGraph, inputs: Sequence[torch.Tensor]) -> LoweredGraph:
        """Rewrite, check the values of the whole model, and roll back whatever breaks them."""
        gate = Gate()
        self.progress("rewriting the graph")
        lowered = self.rewrite(captured, inputs, gate)
        if self.check is Check.OFF:
            return lowered
        self.progress("checking values")
        reference = ModelCheck.measure(captured, inputs)
        banned: frozenset[str] = frozenset()
        undone: list[RolledBack] = []
        for _ in range(_ATTEMPTS):
            verdict = reference.judge(run_flat(lowered, inputs))
            if verdict.wrong is None or not gate.allowed:
                break
            self.progress("looking for the rewrite that changed values")
            culprit = self._find(captured, inputs, reference, gate)
            banned |= {culprit}
            undone.append(_rolled_back(culprit, verdict))
            gate = Gate(banned=banned)
            lowered = self.rewrite(captured, inputs, gate)
        for event in undone:
            lowered.log.add(event)
        lowered.log.add(_checked(verdict))
        return lowered

    def _find(
        self,
        captured: CapturedGraph,
        inputs: Sequence[torch.Tensor],
        reference: ModelCheck,
        gate: Gate,
    ) -> str:
        """Return the key of the first rewrite after which values are wrong."""

        def holds(fuel: int) -> bool:
            some = self.rewrite(captured, inputs, Gate(fuel, gate.banned))
            return reference.judge(run_flat(some, inputs)).wrong is None

        return gate.allowed[bisect(len(gate.allowed), holds) - 1]


def run_flat(program: LoweredGraph, inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Run a graph as it stands on flat inputs, without compiling it."""
    with torch.no_grad():
        return tuple(Interpreter(program.module).run(*inputs))


def _rolled_back(key: str, verdict: Verdict) -> RolledBack:
    room, _, rest = key.partition("/")
    rule = rest.partition("@")[0]
    repro = f"qfuse.compile(model, args, check='site') and look for {key}"
    return RolledBack(room, rule, key, (), verdict.wrong or "", repro)


def _checked(verdict: Verdict) -> Checked:
    note = verdict.wrong or ""
    passed = verdict.wrong is None
    return Checked(
        "check", "model", passed, Exactness.ROUNDING, verdict.error, verdict.allowed, note
    )
