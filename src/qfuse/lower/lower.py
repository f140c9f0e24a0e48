"""Lower every qfuse op to the cheapest kernel that accepts it, or expand it to ATen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from qfuse.cost.model import CostModel
from qfuse.ir.events import FLOAT, ExpandCause, KernelProgress, Lowered
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import (
    SITE_META,
    WORK_META,
    LoweredGraph,
    OptimizedGraph,
    site_of,
)
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.activation import as_activation
from qfuse.ir.ops.convolution import as_fused_convolution
from qfuse.ir.ops.linear import as_fused_linear
from qfuse.ir.ops.matmul import as_fused_matmul
from qfuse.ir.ops.norms import as_fused_norm
from qfuse.ir.ops.softmax import as_softmax
from qfuse.ir.refusal import Refusal
from qfuse.ir.stages.verify import verify
from qfuse.lower.estimate import log_estimates
from qfuse.lower.events import NotLowered, expanded, in_float, on_kernel
from qfuse.lower.expand.batch_norm import expand_batch_norms
from qfuse.lower.expand.describe import (
    describe_node,
    describe_problem,
    describe_rowwise,
)
from qfuse.lower.expand.expand import Expander
from qfuse.lower.floats.attention import lower_attention
from qfuse.lower.floats.choose import FloatChoice, FloatChoices, choose_floats
from qfuse.lower.floats.form import float_call
from qfuse.lower.fold import fold_constants
from qfuse.lower.forced import forced_choice
from qfuse.lower.kernels.aten_int_product import lower_int_products
from qfuse.lower.layout.assign import assign_channels_last
from qfuse.lower.layout.byte_reductions import widen_byte_reductions
from qfuse.lower.layout.cats import lower_cats
from qfuse.lower.layout.conv1d import lower_conv1d
from qfuse.lower.layout.lookups import lower_lookups
from qfuse.lower.layout.max_pools import widen_max_pools
from qfuse.lower.measure.wishes import Wishes
from qfuse.lower.originals import Originals
from qfuse.lower.problems.claim import Claim
from qfuse.lower.problems.convolution import convolution_problem
from qfuse.lower.problems.linear import linear_problem
from qfuse.lower.problems.linear_rowwise import LinearRowwiseProblem, linear_rowwise_problem
from qfuse.lower.problems.matmul import matmul_problem
from qfuse.lower.problems.problem import Problem
from qfuse.lower.problems.product import ProductProblem, WeightedProblem, split_epilogue
from qfuse.lower.problems.rowwise import RowwiseOp, rowwise_problem
from qfuse.lower.product_size import Int8Kernels
from qfuse.lower.rival import choose
from qfuse.lower.select.context import LoweringContext
from qfuse.lower.select.kernel import Kernel
from qfuse.lower.select.select import Loser, Losers, Offer, accepting
from qfuse.lower.unfused import log_unfused
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
    wishes: Wishes | None = None,
) -> LoweredGraph:
    """Lower ``program`` for ``target``; the program is consumed.

    Args:
        program: The graph.
        target: The machine to lower for.
        cost: Predicts the time of kernels.
        kernels: The registry; its order breaks ties.
        context: Rewrite budget and value checks; by default unlimited and none.
        wishes: Kernels that a plan forces, and when a product may run in float; by default none,
            and where that is faster.

    Raises:
        PlanError: A forced kernel does not exist, or refuses its op.
    """
    context = context or RewriteContext("lower")
    session = RewriteSession(program, context)
    wishes = wishes or Wishes()
    shared = LoweringContext(session, target, cost, kernels, wishes.forced, wishes.times)
    _Lowering(shared, wishes).run()
    fold_constants(program, context)
    Originals(session).drop()
    # Edits do not regenerate the module's code.
    program.module.recompile()
    done = LoweredGraph(program.module, program.signature, program.log)
    verify(done)
    return done


class _Lowering:
    """State of one call of :func:`lower`."""

    def __init__(self, context: LoweringContext, wishes: Wishes) -> None:
        self._context = context
        self._wishes = wishes
        self._floats = FloatChoices()
        self._session = context.session
        self._graph = context.program.graph
        self._log = context.program.log
        self._expander = Expander()
        self._originals = Originals(self._session)
        # Why rowwise ops are not fused with the linear that produces their input.
        self._apart: dict[Node, Losers] = {}

    def run(self) -> None:
        context = self._context
        int8 = Int8Kernels.of(context.kernels, context.target)
        log_estimates(context.program, context.cost, int8, context.stage)
        for node in self._graph.nodes:
            log_unfused(node, self._log, self._context.stage)
        # Before layouts are assigned: channels-last pools of 8-bit values raise for larger images.
        widen_max_pools(self._session)
        # Before kernels are selected: the kernels of convolutions read channels-last pixels, and a
        # copy in front of each would cost two passes over memory.
        assign_channels_last(self._context)
        self._floats = self._choose_floats()
        # Before linears, since a linear that was lowered alone can no longer be fused.
        for node in list(self._graph.nodes):
            self._lower_linear_rowwise(node)
        for node in list(self._graph.nodes):
            product = self._product(node)
            if product is not None:
                self._lower_product(product)
        for node in list(self._graph.nodes):
            op = as_fused_norm(node) or as_activation(node)
            if op is not None:
                self._lower_rowwise(op)
            elif as_softmax(node) is not None:
                why = f"no kernel computes a softmax: {self._loops}"
                self._report_expanded(node, describe_node(node), (), why, ExpandCause.LOOPS)
        # After linears: the products that are left are part of none of them.
        lower_int_products(self._session, self._context.target)
        # After products, which multiply their sums by the factors of a norm.
        expand_batch_norms(self._session)
        # Last, since kernels inspect the canonical ops of scales and zero points.
        for node in list(self._graph.nodes):
            if is_call(node, *ops.CANONICAL, *ops.FUSED):
                self._expand(node)
        # After expansion, since images may be joined as what it makes of them.
        lower_cats(self._context)
        lower_lookups(self._session)
        # After expansion, since a quantized convolution may run in float.
        lower_conv1d(self._session, self._context.target)
        # After expansion, which computes quantized attention in float.
        lower_attention(self._context)
        # After expansion, which may reduce quantized values.
        widen_byte_reductions(self._session)

    def _choose_floats(self) -> FloatChoices:
        """Choose the products that run in float, all together: they share a bound on memory."""
        nodes, symbols = list(self._graph.nodes), self._context.symbols
        products = [one for one in map(self._product, nodes) if one is not None]
        fused = [linear_rowwise_problem(node, symbols) for node in nodes]
        both = [one for one in fused if isinstance(one, LinearRowwiseProblem)]
        wishes = self._wishes
        if wishes.measurer is not None:
            wishes.measurer.measure(products, self._context, wishes.floats)
        return choose_floats(products, both, self._context, wishes.floats)

    def _lower_linear_rowwise(self, node: Node) -> None:
        problem = linear_rowwise_problem(node, self._context.symbols)
        if isinstance(problem, Refusal):
            self._apart[node] = (_apart_from_linear(problem.reason),)
        elif problem is not None and problem.linear.node in self._floats.taken:
            self._apart[node] = (_apart_from_linear("the linear runs in float"),)
        elif problem is not None:
            # Without this fusion, the linear and the op are lowered one by one.
            left = self._lower(problem)
            if left is not None:
                self._apart[node] = left.losers

    def _product(self, node: Node) -> ProductProblem | None:
        """Describe ``node`` for the kernels if it is a fused product."""
        linear, convolution = as_fused_linear(node), as_fused_convolution(node)
        matmul = as_fused_matmul(node)
        if linear is not None:
            return linear_problem(linear, self._context.symbols)
        if convolution is not None:
            return convolution_problem(convolution, self._context.symbols)
        if matmul is not None:
            return matmul_problem(matmul, self._context.symbols)
        return None

    def _lower_product(self, problem: ProductProblem) -> None:
        place = problem.place
        choice = self._floats.taken.get(place)
        if choice is not None and self._runs_in_float(problem, choice):
            return
        left = self._lower(problem)
        if left is not None and not left.denied:
            left = self._lower_in_float(problem, left)
        if left is None:
            return
        stage, what = self._context.stage, describe_problem(problem)
        event = expanded(stage, place, what, left.losers, left.why, left.cause)
        if choice is not None and choice.rival is None:
            why = f"{left.why}: {choice.why}"
            if self._use_floats(problem, choice, replace(event, why=why, added_bytes=choice.added)):
                return
        self._log.add(event)
        self._expand(place)

    def _runs_in_float(self, problem: ProductProblem, choice: FloatChoice) -> bool:
        """Compute ``problem`` in float if that is faster and permitted; return whether it is."""
        if choice.rival is None and self._context.forced_kernel(problem) is None:
            return False
        losers = (*choice.losers(problem), *self._context.select(problem).losers)
        event = in_float(self._context.stage, problem, choice, losers)
        event = replace(event, measured_float=self._context.measured_float(problem))
        return self._use_floats(problem, choice, event)

    def _use_floats(self, problem: ProductProblem, choice: FloatChoice, event: Lowered) -> bool:
        """Expand ``problem`` with its dequantized weight; return whether that is permitted."""
        place = problem.place

        def edit(rw: Rewriter) -> Node:
            call = float_call(problem, choice.weight, rw)
            call.meta[SITE_META] = site_of(place)
            rw.replace(place, call)
            return call

        # The weight is dequantized by the ops that would do so in every call.
        proof = Exactness.EXACT
        done = self._session.rewrite(
            "lower-in-float", place, edit, proof=proof, event=lambda *_: event
        )
        if isinstance(done, Refusal):
            return False
        self._expand(done.made)
        return True

    def _lower_in_float(self, problem: ProductProblem, left: NotLowered) -> NotLowered | None:
        """Dequantize the activation of ``problem``, for kernels that read its quantized weight.

        The expansion would dequantize the weight too, on every call or as a larger constant.
        """
        if not isinstance(problem, WeightedProblem) or problem.fused.x_params is None:
            return left
        # Why no kernel reads both operands, after the kernels that do not read the weight.
        place = problem.place
        self._apart[place] = (*self._apart.get(place, ()), *left.losers)
        found = self._lower(replace(problem, in_float=True))
        if found is None or found.denied:
            return found
        return left

    def _lower_rowwise(self, op: RowwiseOp) -> None:
        """Lower ``op``, or leave it to be expanded with the other ops.

        The compiler turns an expanded op into loops, which read a row once per statistic but
        avoid the overhead of a call: they are faster for few rows.
        """
        problem = rowwise_problem(op, self._context.symbols)
        if isinstance(problem, Refusal):
            covering = (k for k in self._context.kernels if (type(op),) in k.covers)
            names = [KernelProgress(kernel.name) for kernel in covering]
            left = NotLowered(tuple(Loser(name, problem.reason) for name in names))
        else:
            found = self._lower(problem)
            if found is None:
                return
            left = found
        losers = (*left.losers, *self._apart.get(op.node, ()))
        why = self._loops
        self._report_expanded(op.node, describe_rowwise(op), losers, why, ExpandCause.LOOPS)

    @property
    def _loops(self) -> str:
        """What runs an op that no kernel takes."""
        if self._context.cost.loops:
            return "it is compiled to loops with the surrounding ops"
        return "the backend compiles nothing, so it runs op by op"

    def _lower(self, problem: Problem) -> NotLowered | None:
        """Replace ``problem`` by the cheapest kernel, or return why there is none."""
        choice = forced_choice(problem, self._context) or choose(problem, self._context)
        offer = choice.offer
        if offer is None:
            return NotLowered(choice.losers)
        losers = (*choice.losers, *self._apart.get(problem.place, ()))
        if isinstance(problem, ProductProblem) and problem.place in self._floats.lost:
            losers = (*losers, Loser(KernelProgress(FLOAT), self._floats.lost[problem.place]))
        event = on_kernel(self._context.stage, problem, offer, losers)
        event = replace(event, measured_float=self._context.measured_float(problem))
        done = self._session.rewrite(
            problem.rule,
            problem.anchor,
            lambda rw: self._emit(problem, offer, rw),
            # Kernels scale sums instead of their terms, and norms sum in another order.
            proof=Exactness.ROUNDING,
            event=lambda *_: event,
        )
        if isinstance(done, Refusal):
            denied = accepting(offer, problem, done.reason)
            return NotLowered((*choice.losers, denied), denied=True)
        self._originals.erased(done.erased)
        return None

    def _emit(self, problem: Problem, offer: Offer, rw: Rewriter) -> None:
        """Emit the kernel call and the remaining ATen ops, and redirect users to the results."""
        made = offer.kernel.emit(problem, offer.claim, rw)
        # Kernels that cover a rowwise op cover it whole; a product may leave steps of its epilogue.
        if isinstance(problem, ProductProblem):
            made = {0: self._finish(problem, made[0], offer.claim, rw)}
        for old in problem.replaced:
            rw.replace(old.node, made[old.index], but=old.but)
        for node in rw.journal.made:
            node.meta.update({SITE_META: site_of(problem.place), WORK_META: offer.claim.work})

    def _finish(self, problem: ProductProblem, y: Node, claim: Claim, rw: Rewriter) -> Node:
        """Emit the epilogue ops and the quantize that the kernel does not cover, as ATen."""
        fused, rest = problem.fused, split_epilogue(problem, claim)[1]
        if rest.ops:
            y = self._expander.apply(rest, y, fused.extras, rw)
        if fused.out_params is None or claim.output:
            return y
        left = rw.call(ops.quantize, *fused.out_params.call_args(y))
        expanded = self._expander.expand(left, rw)
        assert isinstance(expanded, Node), "quantize has one result"
        return expanded

    def _expand(self, node: Node) -> None:
        """Replace ``node`` by its expansion to ATen.

        Raises:
            CheckError: The expansion returns other values than the op.
        """
        self._expander.replace(node, self._session)

    def _report_expanded(
        self, node: Node, what: str, losers: Losers, why: str, cause: ExpandCause
    ) -> None:
        self._log.add(expanded(self._context.stage, node, what, losers, why, cause))


def _apart_from_linear(reason: str) -> Loser:
    return Loser(KernelProgress("with the linear"), reason)
