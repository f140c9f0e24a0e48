"""The shared state of one lowering."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from qfuse.cost.model import CostModel
from qfuse.cost.times import Seconds, Times
from qfuse.ir.events import FLOAT
from qfuse.ir.graph.stage_graph import StageGraph, SymbolRange, site_of
from qfuse.lower.problems.linear import linear_problem
from qfuse.lower.problems.linear_rowwise import LinearRowwiseProblem
from qfuse.lower.problems.problem import Problem
from qfuse.lower.problems.product import ProductProblem, WeightedProblem
from qfuse.lower.select.kernel import Kernel
from qfuse.lower.select.select import Asked, Choice, Offer, ask, select
from qfuse.lower.select.texts import product_text
from qfuse.rewrite.session import RewriteSession
from qfuse.targets.target import Target


@dataclass(frozen=True, slots=True)
class LoweringContext:
    """The shared state of one lowering.

    Attributes:
        session: Rewrites the graph.
        target: The machine to lower for.
        cost: Predicts the time of kernels.
        kernels: The registry.
        forced: Kernels that a plan asks for, by the name of the op in the optimized graph.
        times: Measured times of products.
        asked: The answers of kernels about products, which are asked when floats are chosen and
            when they are lowered. Lowering other ops does not change what they depend on.
    """

    session: RewriteSession
    target: Target
    cost: CostModel
    kernels: Sequence[Kernel[Any]]
    forced: Mapping[str, str] = field(default_factory=dict)
    times: Times = field(default_factory=Times)
    asked: dict[Hashable, Asked] = field(default_factory=dict)

    @property
    def program(self) -> StageGraph:
        """The graph."""
        return self.session.program

    @property
    def stage(self) -> str:
        """Name of the stage, for events."""
        return self.session.context.stage

    @property
    def symbols(self) -> Mapping[str, SymbolRange]:
        """The ranges of the dynamic sizes."""
        return self.program.signature.symbols

    def forced_kernel(self, problem: Problem) -> str | None:
        """Return the kernel that a plan asks for, by the name of the op in the optimized graph."""
        return self.forced.get(site_of(problem.place))

    def select(self, problem: Problem) -> Choice:
        """Ask every kernel that covers ``problem``, and select the fastest."""
        return select(self._ask(problem), problem, self.cost, self.known_times(problem))

    def offers(self, problem: Problem) -> tuple[Offer, ...]:
        """Return the kernels that accept ``problem``, with predicted times."""
        return self._ask(problem).offers

    def known_times(self, problem: Problem) -> Seconds:
        """Return the measured times of a product, without the loops around it."""
        if not self.times.known or not isinstance(problem, ProductProblem):
            return {}
        return self.times.of(product_text(problem))

    def measured_float(self, problem: Problem) -> float | None:
        """Return the measured time of a product in float, alone or with the op after it."""
        if isinstance(problem, LinearRowwiseProblem):
            problem = linear_problem(problem.linear, self.symbols)
        if isinstance(problem, WeightedProblem):
            # The activation is quantized in the product that was measured.
            problem = replace(problem, in_float=False)
        return self.known_times(problem).get(FLOAT)

    def _ask(self, problem: Problem) -> Asked:
        if not isinstance(problem, (ProductProblem, LinearRowwiseProblem)):
            return ask(problem, self.kernels, self.target, self.cost)
        in_float = isinstance(problem, WeightedProblem) and problem.in_float
        # A plan may leave one kernel only.
        names = tuple(kernel.name for kernel in self.kernels)
        key = (problem.place, type(problem), in_float, names)
        if key not in self.asked:
            self.asked[key] = ask(problem, self.kernels, self.target, self.cost)
        return self.asked[key]
