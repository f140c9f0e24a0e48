"""The events of lowering: what runs each op, and why not something else."""

from __future__ import annotations

from dataclasses import dataclass

from qfuse.ir.events import EXPAND, FLOAT, ExpandCause, KernelProgress, Lowered
from qfuse.ir.graph.stage_graph import place_of
from qfuse.lower.expand.describe import describe_problem, describe_rest
from qfuse.lower.floats.choose import FloatChoice
from qfuse.lower.problems.linear_rowwise import LinearRowwiseProblem
from qfuse.lower.problems.problem import Problem
from qfuse.lower.problems.product import ProductProblem, WeightedProblem
from qfuse.lower.select.select import Losers, Offer
from qfuse.rewrite.prelude import Node


@dataclass(frozen=True, slots=True)
class NotLowered:
    """Why a problem was not lowered to a kernel.

    Attributes:
        losers: The kernels, each with its reason.
        denied: Whether a kernel was selected, but the rewrite was denied or rolled back.
    """

    losers: Losers
    denied: bool = False

    @property
    def why(self) -> str:
        """The reason in short."""
        return "its kernel is not permitted" if self.denied else "no kernel accepts it"

    @property
    def cause(self) -> ExpandCause:
        """The reason for the report's numbers."""
        return ExpandCause.DENIED if self.denied else ExpandCause.NO_KERNEL


def on_kernel(stage: str, problem: Problem, offer: Offer, losers: Losers) -> Lowered:
    """Return the event of a problem that runs on the kernel of ``offer``."""
    opened = isinstance(problem, WeightedProblem) and problem.in_float
    note = "no kernel reads both operands: the activation is dequantized" if opened else ""
    notes = (offer.claim.note, note, describe_rest(problem, offer.claim))
    return Lowered(
        *(stage, place_of(problem.place), offer.kernel.name, describe_problem(problem)),
        *(offer.seconds, _pairs(losers), "; ".join(filter(None, notes))),
        dequantized=opened,
        weight_only=_reads_floats(problem),
        measured=offer.measured,
        progress=_progress(losers),
    )


def in_float(stage: str, problem: ProductProblem, choice: FloatChoice, losers: Losers) -> Lowered:
    """Return the event of a product that runs in float, since that is faster."""
    return Lowered(
        *(stage, place_of(problem.place), FLOAT, describe_problem(problem)),
        *(choice.seconds, _pairs(losers), choice.why),
        cause=ExpandCause.PROFIT,
        measured=choice.measured,
        rival_seconds=None if choice.rival is None else choice.rival.seconds,
        added_bytes=choice.added,
        progress=_progress(losers),
    )


def expanded(
    stage: str, node: Node, what: str, losers: Losers, why: str, cause: ExpandCause
) -> Lowered:
    """Return the event of an op that is expanded to ATen."""
    return Lowered(
        *(stage, place_of(node), EXPAND, what, None, _pairs(losers), why, cause),
        progress=_progress(losers),
    )


def _pairs(losers: Losers) -> tuple[tuple[str, str], ...]:
    return tuple((loser.progress.kernel, loser.reason) for loser in losers)


def _progress(losers: Losers) -> tuple[KernelProgress, ...]:
    return tuple(loser.progress for loser in losers)


def _reads_floats(problem: Problem) -> bool:
    """Whether the kernel of a product multiplies floats by a quantized weight."""
    product = problem.problem if isinstance(problem, LinearRowwiseProblem) else problem
    if not isinstance(product, WeightedProblem):
        return False
    return product.in_float or product.fused.x_params is None
