"""Lower every op of qfuse: to the cheapest kernel that takes it, or to its meaning in ATen."""

from __future__ import annotations

from collections.abc import Sequence

from qfuse.cost.model import CostModel
from qfuse.ir.errors import CheckError
from qfuse.ir.events import Left, Lowered
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import LoweredGraph, OptimizedGraph, place_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.epilogue import Epilogue
from qfuse.ir.ops.linear import FusedLinear, as_fused_linear
from qfuse.ir.stages.verify import verify
from qfuse.lower.expand.describe import describe
from qfuse.lower.expand.expand import Expander, results_of
from qfuse.lower.fold import drop_unused_constants, fold_constants
from qfuse.lower.kernel.context import LoweringContext
from qfuse.lower.kernel.protocol import LinearKernel, LinearProblem, problem_of, split_epilogue
from qfuse.lower.kernel.select import Choice, choose
from qfuse.lower.kernels.aten_int_product import lower_int_products
from qfuse.lower.leftovers import reason_to_stay
from qfuse.lower.linear_rowwise.lower import PairLowering
from qfuse.lower.rowwise.lower import lower_rows
from qfuse.lower.rowwise.problem import RowKernel
from qfuse.rewrite.commit import verify_and_commit
from qfuse.rewrite.driver import RewriteContext
from qfuse.rewrite.prelude import Exactness, Node, Rewriter
from qfuse.rewrite.rewriter import GraphEditor
from qfuse.targets.target import Target


def lower(
    program: OptimizedGraph,
    target: Target,
    cost: CostModel,
    kernels: Sequence[LinearKernel],
    context: RewriteContext | None = None,
    *,
    rows: Sequence[RowKernel] = (),
) -> LoweredGraph:
    """Lower ``program``, which is consumed, for ``target``.

    Args:
        program: The graph.
        target: Where it will run.
        cost: Prices the kernels.
        kernels: The rows of the table, in the order that breaks ties.
        context: Permissions and proof; only its room's name differs from the default.
        rows: The kernels of norms and activations that give codes.
    """
    context = context or RewriteContext("lower")
    _Lowering(program, target, cost, kernels, rows, context).run()
    fold_constants(program, context)
    drop_unused_constants(program)
    # The module's generated code still is that of the captured graph.
    program.module.recompile()
    done = LoweredGraph(program.module, program.signature, program.log)
    verify(done)
    return done


class _Lowering:
    """State of one call of :func:`lower`."""

    def __init__(
        self,
        program: OptimizedGraph,
        target: Target,
        cost: CostModel,
        kernels: Sequence[LinearKernel],
        rows: Sequence[RowKernel],
        context: RewriteContext,
    ) -> None:
        self._program = program
        self._target = target
        self._cost = cost
        self._kernels = kernels
        self._rows = rows
        self._context = context
        self._editor = GraphEditor(program.module)
        self._expander = Expander()

    def run(self) -> None:
        # Reasons are read off the whole graph, before any of it is gone.
        for node in self._program.graph.nodes:
            if is_call(node, ops.quantize, ops.dequantize, ops.requantize):
                reason = reason_to_stay(node)
                self._program.log.add(Left(self._context.stage, place_of(node), reason))
        bench = LoweringContext(
            self._program, self._target, self._cost, self._editor, self._context
        )
        # First, since a linear alone is no half of a pair any more.
        apart = PairLowering(bench, self._kernels, self._rows).run()
        for node in list(self._program.graph.nodes):
            fused = as_fused_linear(node)
            if fused is not None:
                self._lower_linear(fused)
        lower_rows(bench, self._rows, apart)
        lower_int_products(self._program, self._target, self._editor, self._context)
        # Last, since kernels read scales and zero points that are still canonical.
        for node in list(self._program.graph.nodes):
            if is_call(node, *ops.CANONICAL, *ops.FUSED):
                self._expand(node)

    def _lower_linear(self, fused: FusedLinear) -> None:
        problem = problem_of(fused, self._program.signature.symbols)
        choice = choose(problem, self._kernels, self._target, self._cost)
        key = f"{self._context.stage}/lower-linear@{fused.node.name}"
        taken = choice.kernel is not None and self._context.budget.allows(key)
        if not taken or not self._emit(problem, choice, key):
            why = "no kernel takes it" if choice.kernel is None else "its kernel is not permitted"
            event = self._event(fused.node, "expand", None, choice.losers, why)
            self._program.log.add(event)
            self._expand(fused.node)

    def _emit(self, problem: LinearProblem, choice: Choice, key: str) -> bool:
        """Replace the op by the chosen kernel and what it leaves; return whether that held."""
        assert choice.kernel is not None, "asked to emit without a kernel"
        assert choice.claim is not None, "a chosen kernel has a claim"
        node = problem.fused.node
        place = place_of(node)
        rw = self._editor.rewriter("lower-linear", node)
        result = choice.kernel.emit(problem, choice.claim, rw)
        rest = split_epilogue(problem, choice.claim)[1]
        rw.replace(node, self._finish(problem.fused, result, rest, choice.claim.output, rw))
        # Noted first, since committing erases the op that the note describes.
        event = self._event(
            node, choice.kernel.name, choice.seconds, choice.losers, choice.claim.note
        )
        if not verify_and_commit(
            rw, self._context, self._program.log, key, Exactness.ROUNDING, place
        ):
            return False
        self._program.log.add(event)
        return True

    def _finish(
        self, fused: FusedLinear, result: Node, rest: Epilogue, output: bool, rw: Rewriter
    ) -> Node:
        """Add the steps and the quantize that a kernel leaves, as ATen."""
        y = result
        if rest.steps:
            y = self._expander.apply(rest, y, fused.extras, rw)
        if fused.out_params is None or output:
            return y
        params = fused.out_params
        left = rw.call(ops.quantize, *params.call_args(y))
        expanded = self._expander.expand(left, rw)
        assert isinstance(expanded, Node), "quantize has one result"
        return expanded

    def _expand(self, node: Node) -> None:
        rw = self._editor.rewriter("expand", node)
        made = self._expander.expand(node, rw)
        if isinstance(made, Node):
            rw.replace(node, made)
        else:
            for index, user in results_of(node).items():
                rw.replace(user, made[index])
        key = f"{self._context.stage}/expand@{node.name}"
        log, place = self._program.log, place_of(node)
        if not verify_and_commit(rw, self._context, log, key, Exactness.EXACT, place):
            raise CheckError(
                f"{node.name}: the expansion of {node.target} gives other values than the op",
                where=str(place),
                fix="this is a bug of qfuse; please report it with the model",
            )

    def _event(
        self,
        node: Node,
        kernel: str,
        seconds: float | None,
        losers: tuple[tuple[str, str], ...],
        why: str,
    ) -> Lowered:
        fused = as_fused_linear(node)
        what = "" if fused is None else describe(fused)
        stage = self._context.stage
        return Lowered(stage, place_of(node), kernel, what, seconds, losers, why)
