"""Alternatives to a kernel that may be faster: compiled loops, or two kernels."""

from __future__ import annotations

from dataclasses import replace

from qfuse.ir.refusal import Refusal
from qfuse.lower.problems.linear import linear_problem
from qfuse.lower.problems.linear_rowwise import LinearRowwiseProblem
from qfuse.lower.problems.problem import Problem
from qfuse.lower.problems.rowwise import RowwiseOp, RowwiseProblem, loops_of, rowwise_problem
from qfuse.lower.select.context import LoweringContext
from qfuse.lower.select.select import Choice, Offer, Rival, against


def choose(problem: Problem, context: LoweringContext) -> Choice:
    """Select the kernel of ``problem``, if it is faster than the alternative."""
    choice = context.select(problem)
    if choice.offer is None:
        return choice
    if isinstance(problem, LinearRowwiseProblem):
        scaled = replace(choice, offer=measured_offer(choice.offer, problem, context))
        return against(scaled, problem, _two_kernels(problem, context))
    loops = choice.offer.claim.loops
    # The alternative of a product is a float product, which is chosen for all of them together.
    # Without a compiler there are no loops.
    if loops is None or not context.cost.loops:
        return choice
    rival = Rival("compiled loops", context.cost.seconds(loops), shown=False)
    return against(choice, problem, rival)


def measured_offer(offer: Offer, problem: LinearRowwiseProblem, context: LoweringContext) -> Offer:
    """Return a fused kernel, corrected by how wrong the prediction of its linear alone was."""
    linear = context.select(linear_problem(problem.linear, context.symbols)).offer
    if linear is None or not linear.measured or linear.kernel.name != offer.kernel.name:
        return offer
    return replace(offer, seconds=offer.seconds + linear.seconds - linear.predicted)


def _two_kernels(problem: LinearRowwiseProblem, context: LoweringContext) -> Rival | None:
    """Predict the time of linear and op run separately; ``None`` if no kernel accepts them."""
    linear = context.select(linear_problem(problem.linear, context.symbols))
    # The linear alone would be expanded to float, and the fused kernel needs no comparison.
    if linear.seconds is None:
        return None
    return Rival("two kernels", linear.seconds + rowwise_seconds(problem.op, context))


def rowwise_seconds(op: RowwiseOp, context: LoweringContext) -> float:
    """Predict the time of an op alone: in a kernel, or in compiled loops if they are faster."""
    problem = rowwise_problem(op, context.symbols)
    # No kernel supports the op, for instance because its result is float: loops compute it.
    if isinstance(problem, Refusal):
        return context.cost.seconds(loops_of(op, context.symbols))
    choice = choose(problem, context)
    if choice.seconds is not None:
        return choice.seconds
    assert isinstance(problem, RowwiseProblem), "a problem, or the reason that there is none"
    # Dynamic parameters need the extremes of a row before its values can be quantized: two passes.
    return context.cost.seconds(problem.passes(1 if op.output.choose is None else 2))
