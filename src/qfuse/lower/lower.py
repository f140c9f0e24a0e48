"""Lower every op of qfuse: to the cheapest kernel that takes it, or to its meaning in ATen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qfuse.cost.model import CostModel
from qfuse.ir.errors import CheckError
from qfuse.ir.events import Left, Lowered
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import LoweredGraph, OptimizedGraph, place_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.activation import as_activation
from qfuse.ir.ops.linear import FusedLinear, as_fused_linear
from qfuse.ir.ops.norms import as_fused_norm
from qfuse.ir.refusal import Refusal
from qfuse.ir.stages.verify import verify
from qfuse.lower.expand.describe import describe, describe_rowwise
from qfuse.lower.expand.expand import Expander, results_of
from qfuse.lower.fold import drop_unused_constants, fold_constants
from qfuse.lower.kernels.aten_int_product import lower_int_products
from qfuse.lower.leftovers import reason_to_stay
from qfuse.lower.problems.linear import LinearProblem, linear_problem, split_epilogue
from qfuse.lower.problems.linear_rowwise import linear_rowwise_problem
from qfuse.lower.problems.problem import Problem
from qfuse.lower.problems.rowwise import RowwiseOp, rowwise_problem
from qfuse.lower.rival import choose
from qfuse.lower.select.context import LoweringContext
from qfuse.lower.select.kernel import Claim, Kernel
from qfuse.lower.select.select import Losers, Offer
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.prelude import Exactness, Node, Rewriter
from qfuse.rewrite.session import RewriteSession
from qfuse.targets.target import Target


def lower(
    program: OptimizedGraph,
    target: Target,
    cost: CostModel,
    kernels: Sequence[Kernel[Any]],
    context: RewriteContext | None = None,
) -> LoweredGraph:
    """Lower ``program``, which is consumed, for ``target``.

    Args:
        program: The graph.
        target: Where it will run.
        cost: Prices the kernels.
        kernels: The registry, in the order that breaks ties.
        context: Permissions and proof; only its stage's name differs from the default.
    """
    context = context or RewriteContext("lower")
    session = RewriteSession(program, context)
    _Lowering(LoweringContext(session, target, cost, kernels)).run()
    fold_constants(program, context)
    drop_unused_constants(program)
    # The module's generated code still is that of the captured graph.
    program.module.recompile()
    done = LoweredGraph(program.module, program.signature, program.log)
    verify(done)
    return done


@dataclass(frozen=True, slots=True)
class _NotLowered:
    """Why no kernel runs a problem.

    Attributes:
        losers: The kernels, each with its reason.
        denied: Whether one was selected, and not permitted or rolled back.
    """

    losers: Losers
    denied: bool = False


class _Lowering:
    """State of one call of :func:`lower`."""

    def __init__(self, context: LoweringContext) -> None:
        self._context = context
        self._session = context.session
        self._graph = context.program.graph
        self._log = context.program.log
        self._expander = Expander()
        # Why rowwise ops do not share a kernel with the linear in front of them.
        self._apart: dict[Node, Losers] = {}

    def run(self) -> None:
        # Reasons are read off the whole graph, before any of it is gone.
        for node in self._graph.nodes:
            if is_call(node, ops.quantize, ops.dequantize, ops.requantize):
                reason = reason_to_stay(node)
                self._log.add(Left(self._context.stage, place_of(node), reason))
        # First, since a linear on a kernel of its own is behind no rowwise op any more.
        for node in list(self._graph.nodes):
            self._lower_linear_rowwise(node)
        for node in list(self._graph.nodes):
            fused = as_fused_linear(node)
            if fused is not None:
                self._lower_linear(fused)
        for node in list(self._graph.nodes):
            op = as_fused_norm(node) or as_activation(node)
            if op is not None:
                self._lower_rowwise(op)
        lower_int_products(self._session, self._context.target)
        # Last, since kernels read scales and zero points that are still canonical.
        for node in list(self._graph.nodes):
            if is_call(node, *ops.CANONICAL, *ops.FUSED):
                self._expand(node)

    def _lower_linear_rowwise(self, node: Node) -> None:
        problem = linear_rowwise_problem(node, self._context.symbols)
        if isinstance(problem, Refusal):
            self._apart[node] = (("with the linear", problem.reason),)
        elif problem is not None:
            left = self._lower(problem)
            if left is not None:
                self._apart[node] = left.losers

    def _lower_linear(self, fused: FusedLinear) -> None:
        problem = linear_problem(fused, self._context.symbols)
        left = self._lower(problem)
        if left is not None:
            why = "its kernel is not permitted" if left.denied else "no kernel takes it"
            self._report_expanded(fused.node, describe(problem), left.losers, why)
            self._expand(fused.node)

    def _lower_rowwise(self, op: RowwiseOp) -> None:
        """Lower ``op``, or leave it to be expanded with everything else.

        A compiler makes loops of that, which read a row once for every statistic, but are no call
        of their own: on few rows they are faster.
        """
        problem = rowwise_problem(op, self._context.symbols)
        if isinstance(problem, Refusal):
            covering = (k for k in self._context.kernels if (type(op),) in k.covers)
            left = _NotLowered(tuple((kernel.name, problem.reason) for kernel in covering))
        else:
            found = self._lower(problem)
            if found is None:
                return
            left = found
        losers = (*left.losers, *self._apart.get(op.node, ()))
        why = "it compiles to loops with what is around it"
        self._report_expanded(op.node, describe_rowwise(op), losers, why)

    def _lower(self, problem: Problem) -> _NotLowered | None:
        """Put the cheapest kernel in the place of ``problem``, or return why there is none."""
        choice = choose(problem, self._context)
        offer = choice.offer
        if offer is None:
            return _NotLowered(choice.losers)
        name, place = offer.kernel.name, place_of(problem.place)
        losers = (*choice.losers, *self._apart.get(problem.place, ()))
        what, seconds, note = describe(problem), offer.seconds, offer.claim.note
        event = Lowered(self._context.stage, place, name, what, seconds, losers, note)
        done = self._session.rewrite(
            problem.rule,
            problem.anchor,
            lambda rw: self._emit(problem, offer, rw),
            proof=Exactness.ROUNDING,
            event=lambda *_: event,
        )
        if isinstance(done, Refusal):
            reason = problem.label(name), done.reason
            return _NotLowered((*choice.losers, reason), denied=True)
        return None

    def _emit(self, problem: Problem, offer: Offer, rw: Rewriter) -> None:
        """Add the call of a kernel, what it leaves as ATen, and let users read its results."""
        made = offer.kernel.emit(problem, offer.claim, rw)
        if isinstance(problem, LinearProblem):
            made = {0: self._finish(problem, made[0], offer.claim, rw)}
        for old in problem.replaced:
            rw.replace(old.node, made[old.index], but=old.but)

    def _finish(self, problem: LinearProblem, y: Node, claim: Claim, rw: Rewriter) -> Node:
        """Add the steps and the quantize that a kernel leaves, as ATen."""
        fused, rest = problem.fused, split_epilogue(problem, claim)[1]
        if rest.steps:
            y = self._expander.apply(rest, y, fused.extras, rw)
        if fused.out_params is None or claim.output:
            return y
        left = rw.call(ops.quantize, *fused.out_params.call_args(y))
        expanded = self._expander.expand(left, rw)
        assert isinstance(expanded, Node), "quantize has one result"
        return expanded

    def _expand(self, node: Node) -> None:
        """Replace ``node`` by its meaning in ATen.

        Raises:
            CheckError: The expansion gives other values.
        """
        place = place_of(node)

        def edit(rw: Rewriter) -> None:
            made = self._expander.expand(node, rw)
            if isinstance(made, Node):
                rw.replace(node, made)
                return
            for index, user in results_of(node).items():
                rw.replace(user, made[index])

        done = self._session.rewrite_always("expand", node, edit, proof=Exactness.EXACT)
        if isinstance(done, Refusal):
            raise CheckError(
                f"{node.name}: the expansion of {node.target} gives other values than the op",
                where=str(place),
                fix="this is a bug of qfuse; please report it with the model",
            )

    def _report_expanded(self, node: Node, what: str, losers: Losers, why: str) -> None:
        stage, place = self._context.stage, place_of(node)
        self._log.add(Lowered(stage, place, "expand", what, losers=losers, why=why))
