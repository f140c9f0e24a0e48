"""The kernel that a plan asks for, whatever it costs."""

from __future__ import annotations

from dataclasses import replace

from qfuse.ir.errors import PlanError
from qfuse.ir.events import EXPAND, FLOAT, KernelProgress
from qfuse.ir.graph.stage_graph import place_of, site_of
from qfuse.lower.problems.linear_rowwise import LinearRowwiseProblem
from qfuse.lower.problems.problem import Problem
from qfuse.lower.problems.product import WeightedProblem
from qfuse.lower.rival import choose
from qfuse.lower.select.context import LoweringContext
from qfuse.lower.select.select import Choice, Loser


def forced_choice(problem: Problem, context: LoweringContext) -> Choice | None:
    """Return the choice that a plan makes for ``problem``, or ``None`` if it makes none.

    A linear and the op after it are fused only where that kernel fuses them, and where this is
    predicted to pay; alone, the kernel runs the linear whatever it costs. A kernel that refuses a
    quantized activation is asked again for the dequantized one, as without a plan.

    Raises:
        PlanError: No kernel of that name covers the op, or it refuses it.
    """
    name = context.forced_kernel(problem)
    if name is None:
        return None
    # A float product is chosen before kernels are; here it was not permitted.
    if name in {EXPAND, FLOAT}:
        what = "expands this op" if name == EXPAND else "runs this op in float"
        return Choice(
            None, (Loser(KernelProgress(problem.label("every kernel")), f"the plan {what}"),)
        )
    named = [kernel for kernel in context.kernels if kernel.name == name]
    only = replace(context, kernels=named)
    if isinstance(problem, LinearRowwiseProblem):
        return choose(problem, only)
    choice = only.select(problem)
    if choice.offer is not None:
        return choice
    if choice.losers and _may_be_in_float(problem):
        return choice
    place = str(place_of(problem.place))
    what = f"the plan runs {site_of(problem.place)} on {name}, which "
    if choice.losers:
        raise PlanError(
            f"{what}refuses it: {choice.losers[0].reason}",
            where=place,
            fix="choose another kernel for it in the plan, or compile without a plan",
        )
    known = sorted({kernel.name for kernel in context.kernels if problem.span in kernel.covers})
    reason = "does not cover such an op" if named else "is not the name of a kernel"
    fix = f"the kernels are {', '.join((*known, FLOAT, EXPAND))}"
    raise PlanError(f"{what}{reason}", where=place, fix=fix)


def _may_be_in_float(problem: Problem) -> bool:
    """Whether kernels are asked again for the problem with its activation dequantized."""
    if not isinstance(problem, WeightedProblem):
        return False
    return problem.fused.x_params is not None and not problem.in_float
