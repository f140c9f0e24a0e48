"""Choose which products of a model run in float."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from qfuse.cost import bytes_text, seconds_text
from qfuse.ir.events import FLOAT
from qfuse.lower.floats.form import (
    FloatWeight,
    dequantize_loops,
    dequantize_work,
    float_loops,
    float_product_work,
    float_weight,
)
from qfuse.lower.floats.policy import FloatPolicy
from qfuse.lower.problems.linear_rowwise import LinearRowwiseProblem
from qfuse.lower.problems.product import ProductProblem, WeightedProblem
from qfuse.lower.rival import measured_offer, rowwise_seconds
from qfuse.lower.select.context import LoweringContext
from qfuse.lower.select.select import Losers, Offer, accepting
from qfuse.rewrite.prelude import Node
from qfuse.targets.huge_pages import HugePages

# A weight in float takes memory, so it has to gain more than predictions are wrong by: a part of
# the time, and more than the calls of two small kernels differ by.
_WORTH = 0.95
_LEAST_GAIN = 2e-6  # seconds


@dataclass(frozen=True, slots=True)
class FloatChoice:
    """A product that is computed in float.

    Attributes:
        seconds: Its time per call; ``None`` if there is no measured speed of its dtype.
        rival: That of the best quantized kernel; ``None`` if no kernel accepts the product.
        added: By how many bytes the constants grow.
        weight: Its dequantized weight; ``None`` if it keeps its operands.
    """

    seconds: float | None
    rival: Offer | None
    added: int = 0
    weight: torch.Tensor | None = None

    def losers(self, problem: ProductProblem) -> Losers:
        """Return the kernel that it is faster than, with both times."""
        if self.rival is None or self.seconds is None:
            return ()
        mine, theirs = seconds_text(self.seconds), seconds_text(self.rival.seconds)
        return (accepting(self.rival, problem, f"{self.rival.how} {theirs}, float {mine}"),)

    @property
    def measured(self) -> bool:
        """Whether its time and that of the kernel were measured."""
        return self.rival is not None and self.rival.measured

    @property
    def why(self) -> str:
        """What the report says about it."""
        more = f"; +{bytes_text(self.added)}" if self.added else ""
        if self.rival is None or self.seconds is None:
            return f"its weight is dequantized once{more}" if self.weight is not None else ""
        mine, theirs = seconds_text(self.seconds), seconds_text(self.rival.seconds)
        return f"runs in float: {self.rival.how} {mine} against {theirs}{more}"


@dataclass(frozen=True, slots=True)
class FloatChoices:
    """The products that are computed in float.

    Attributes:
        taken: Those that run in float, by the node of the product.
        lost: Why others do not, for the report, by node: those that would be faster, those that
            were measured, and products of two activations.
    """

    taken: Mapping[Node, FloatChoice] = field(default_factory=dict)
    lost: Mapping[Node, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A product that may run in float.

    Attributes:
        problem: The product.
        seconds: Its time per call in float, if it is known.
        rival: The fastest kernel, if there is one.
        gain: Seconds that float saves.
        weight: Its quantized weight; ``None`` if none is dequantized.
        pays: Whether float is as fast, or fast enough to take memory for it.
        forced: Whether a plan asks for it.
    """

    problem: ProductProblem
    seconds: float | None
    rival: Offer | None
    gain: float
    weight: FloatWeight | None
    pays: bool = True
    forced: bool = False


def choose_floats(
    products: Sequence[ProductProblem],
    fused: Iterable[LinearRowwiseProblem],
    context: LoweringContext,
    policy: FloatPolicy,
) -> FloatChoices:
    """Choose the products that run in float.

    Where the bound on memory is reached, those go first that save most time per byte.

    Args:
        products: All products of the graph.
        fused: Those linears that may be fused with the op after them.
        context: The lowering; its plan may force kernels.
        policy: What is permitted.
    """
    after = {both.linear.node: both for both in fused}
    found = [
        one
        for problem in products
        if (one := _candidate(problem, after.get(problem.place), context)) is not None
    ]
    users: dict[Hashable, int] = {}
    for problem in products:
        weight = float_weight(problem)
        if weight is not None:
            users[weight.key] = users.get(weight.key, 0) + 1
    return _within(found, users, policy)


def _candidate(
    problem: ProductProblem, after: LinearRowwiseProblem | None, context: LoweringContext
) -> _Candidate | None:
    """Return ``problem`` if its float form is faster than its kernels, or forced."""
    forced = context.forced_kernel(problem)
    if forced not in {None, FLOAT}:
        return None
    weight, seconds = float_weight(problem), _float_seconds(problem, context)
    rival = _best_kernel(problem, context)
    if forced is not None:
        return _Candidate(problem, seconds, rival, 0.0, weight, forced=True)
    if rival is None:
        # Without a kernel, the alternative is to dequantize the weight in every call.
        if weight is None:
            return None
        gain = context.cost.seconds(dequantize_work(weight))
        return _Candidate(problem, seconds, None, gain, weight)
    if seconds is None:
        return None
    theirs = _with_op_behind(rival, after, context)
    gain = theirs.seconds - seconds
    pays = gain >= (0 if weight is None else max(_LEAST_GAIN, (1 - _WORTH) * theirs.seconds))
    return _Candidate(problem, seconds, theirs, gain, weight, pays)


def _float_seconds(problem: ProductProblem, context: LoweringContext) -> float | None:
    work = float_product_work(problem)
    if work is None:
        return None
    product = context.known_times(problem).get(FLOAT)
    if product is None:
        product = context.cost.seconds(work)
    return product + context.cost.seconds(float_loops(problem))


def _best_kernel(problem: ProductProblem, context: LoweringContext) -> Offer | None:
    """Return the fastest kernel that takes ``problem``, as lowering asks them."""
    offer = context.select(problem).offer
    if offer is not None or not isinstance(problem, WeightedProblem):
        return offer
    if problem.fused.x_params is None:
        return None
    offer = context.select(replace(problem, in_float=True)).offer
    if offer is None:
        return None
    # Its activation is dequantized by a loop in front of it.
    loop = context.cost.seconds(dequantize_loops(problem))
    return replace(offer, seconds=offer.seconds + loop)


def _with_op_behind(
    rival: Offer, after: LinearRowwiseProblem | None, context: LoweringContext
) -> Offer:
    """Return the kernel with the part of the time that a fusion with the op after it leaves."""
    if after is None:
        return rival
    offer = context.select(after).offer
    if offer is None:
        return rival
    offer = measured_offer(offer, after, context)
    alone = offer.seconds - rowwise_seconds(after.op, context)
    return replace(offer, seconds=max(alone, 0.0)) if alone < rival.seconds else rival


def _within(
    found: Sequence[_Candidate], users: Mapping[Hashable, int], policy: FloatPolicy
) -> FloatChoices:
    """Take the candidates that pay and that the policy permits."""
    taken: dict[Node, FloatChoice] = {}
    lost = {one.problem.place: _time(one) for one in found if not one.pays and _is_shown(one)}
    total, pages = 0, HugePages()
    paying = _groups([one for one in found if one.pays])
    for group in sorted(paying, key=lambda group: -_gain_per_byte(group, users)):
        added = _added(group, users)
        reason = _refusal(group, total + added, policy)
        if reason:
            lost.update({one.problem.place: reason for one in group if one.rival is not None})
            continue
        total += added
        weight = group[0].weight
        floats = None if weight is None else pages.place(weight.dequantized())
        for one in group:
            taken[one.problem.place] = FloatChoice(one.seconds, one.rival, added, floats)
            # The others share what the first one adds.
            added = 0
    return FloatChoices(taken, lost)


def _is_shown(one: _Candidate) -> bool:
    """Whether the report shows how slow float is: measured, or of two activations."""
    return one.weight is None or (one.rival is not None and one.rival.measured)


def _groups(found: Sequence[_Candidate]) -> list[list[_Candidate]]:
    """Return the candidates that share a weight together."""
    groups: dict[Hashable, list[_Candidate]] = {}
    for one in found:
        key = one.problem.place if one.weight is None else one.weight.key
        groups.setdefault(key, []).append(one)
    return list(groups.values())


def _gain_per_byte(group: Sequence[_Candidate], users: Mapping[Hashable, int]) -> float:
    if any(one.forced for one in group):
        return float("inf")
    return sum(one.gain for one in group) / max(_added(group, users), 1)


def _added(group: Sequence[_Candidate], users: Mapping[Hashable, int]) -> int:
    """Return by how much the constants grow: the quantized weight goes with its last user."""
    weight = group[0].weight
    if weight is None:
        return 0
    gone = weight.quantized_bytes if len(group) == users[weight.key] else 0
    return max(weight.float_bytes - gone, 0)


def _refusal(group: Sequence[_Candidate], total: int, policy: FloatPolicy) -> str:
    """Return why a group may not run in float, or ""."""
    if any(one.forced for one in group):
        return ""
    if not policy.fastest:
        return f"{_time(group[0])}, and prefer is memory"
    if group[0].weight is None or total <= policy.memory_bytes:
        return ""
    bound = bytes_text(policy.memory_bytes)
    return f"{_time(group[0])}, and float_memory lets the constants grow by {bound}"


def _time(one: _Candidate) -> str:
    if one.seconds is None:
        return "not predicted"
    how = "predicted" if one.rival is None else one.rival.how
    return f"{how} {seconds_text(one.seconds)}"
