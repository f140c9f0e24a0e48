"""Lower a linear and the op of rows behind it to one kernel, where that is faster than two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qfuse.cost import seconds_text
from qfuse.ir.events import Lowered
from qfuse.ir.graph.stage_graph import place_of
from qfuse.ir.ops.views import shape_of
from qfuse.ir.quant.spec import Granularity, stored_name
from qfuse.lower.expand.describe import describe, granularity_of
from qfuse.lower.expand.expand import results_of
from qfuse.lower.kernel.context import LoweringContext
from qfuse.lower.kernel.protocol import LinearKernel, Refusal, problem_of
from qfuse.lower.kernel.select import choose
from qfuse.lower.linear_rowwise.match import Pair, PairKernel, pair_of
from qfuse.lower.rowwise.lower import seconds_of_rows
from qfuse.lower.rowwise.problem import RowKernel
from qfuse.rewrite.commit import verify_and_commit
from qfuse.rewrite.prelude import Exactness, Node

Losers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class _Offer:
    kernel: PairKernel
    seconds: float
    losers: Losers


@dataclass(frozen=True, slots=True)
class PairLowering:
    """Replaces pairs by the kernels that run them in one pass.

    Attributes:
        bench: The graph, and what it is lowered with.
        kernels: Those of linears; some of them take pairs.
        rows: Those of the op behind, alone.
    """

    bench: LoweringContext
    kernels: Sequence[LinearKernel]
    rows: Sequence[RowKernel]

    def run(self) -> dict[Node, Losers]:
        """Lower all pairs; return why the other ops stay apart from the linear in front of them."""
        apart: dict[Node, Losers] = {}
        for node in list(self.bench.program.graph.nodes):
            pair = pair_of(node, self.bench.symbols)
            if pair is None:
                continue
            reasons = (
                (("with the linear", pair.reason),)
                if isinstance(pair, Refusal)
                else self._lower(pair)
            )
            if reasons is not None:
                apart[node] = reasons
        return apart

    def _lower(self, pair: Pair) -> Losers | None:
        """Replace one pair; return why not, or ``None`` if it is done."""
        offer = self._offer(pair)
        if not isinstance(offer, _Offer):
            return offer
        key = f"{self.bench.context.stage}/lower-pair@{pair.op.node.name}"
        if not self.bench.context.budget.allows(key):
            return ((_one(offer.kernel), "it is not permitted"),)
        place = place_of(pair.linear.node)
        event = Lowered(
            self.bench.context.stage,
            place,
            offer.kernel.name,
            _describe(pair),
            offer.seconds,
            offer.losers,
            "the linear and what is behind it are one pass",
        )
        # Where others read the linear, they may do so before the op behind it stands.
        at = pair.linear.node if pair.shared else pair.op.node
        rw = self.bench.editor.rewriter("lower-pair", at)
        made = offer.kernel.emit_pair(pair, rw)
        for index, result in results_of(pair.op.node).items():
            rw.replace(result, made[index])
        if pair.shared:
            rw.replace(at, made[pair.kept_at], but=frozenset({pair.op.node}))
        if not verify_and_commit(
            rw, self.bench.context, self.bench.program.log, key, Exactness.ROUNDING, place
        ):
            return ((_one(offer.kernel), "it was rolled back here"),)
        self.bench.program.log.add(event)
        return None

    def _offer(self, pair: Pair) -> _Offer | Losers:
        """Return the best kernel of the pair if it is faster than two, or who refuses and why."""
        losers: list[tuple[str, str]] = []
        offers: list[tuple[float, PairKernel]] = []
        for kernel in self.kernels:
            if not isinstance(kernel, PairKernel):
                continue
            answer = kernel.supported(self.bench.target) or kernel.accepts_pair(pair)
            if isinstance(answer, Refusal):
                losers.append((_one(kernel), answer.reason))
            else:
                offers.append((self.bench.cost.seconds(answer.work), kernel))
        if not offers:
            return tuple(losers)
        seconds, best = min(offers, key=lambda offer: offer[0])
        two = self._seconds_of_two(pair)
        if two is not None and two <= seconds:
            text = f"predicted {seconds_text(seconds)}, two kernels {seconds_text(two)}"
            return (*losers, (_one(best), text))
        if two is not None:
            losers.append(("two kernels", f"predicted {seconds_text(two)}"))
        return _Offer(best, seconds, tuple(losers))

    def _seconds_of_two(self, pair: Pair) -> float | None:
        """Predict the linear and the op behind it, each by itself; ``None`` without a kernel."""
        problem = problem_of(pair.linear, self.bench.symbols)
        linear = choose(problem, self.kernels, self.bench.target, self.bench.cost)
        if linear.seconds is None:
            return None
        return linear.seconds + seconds_of_rows(pair.op, self.rows, self.bench)


def _one(kernel: PairKernel) -> str:
    return f"{kernel.name} with the linear"


def _describe(pair: Pair) -> str:
    """Say what is multiplied, and what its rows become."""
    text, chosen = describe(pair.problem.fused, pair.steps), pair.op.output.chosen
    if chosen is None:
        return text
    spec = chosen[0]
    granularity = granularity_of(spec, shape_of(pair.problem.fused.node), Granularity.PER_TOKEN)
    return f"{text} -> {stored_name(spec.dtype, spec.element)} {granularity} dynamic"
