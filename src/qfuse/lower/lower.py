"""Lower every op of qfuse: to the cheapest kernel that takes it, or to its meaning in ATen."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from torch.fx import Node

from qfuse.ir import ops
from qfuse.ir.errors import CheckError
from qfuse.ir.events import Exactness, Left, Lowered
from qfuse.ir.fused_views import as_activation, as_fused_norm
from qfuse.ir.program import LoweredGraph, OptimizedGraph, place_of
from qfuse.ir.schema import is_call
from qfuse.ir.verify import verify
from qfuse.ir.views import FusedLinear, as_fused_linear
from qfuse.lower.describe import describe, describe_result
from qfuse.lower.expand import Expander, results_of
from qfuse.lower.fold import drop_unused_constants, fold_constants
from qfuse.lower.int_product import lower_int_products
from qfuse.lower.kernel import Priced, Problem, problem_of, split_epilogue
from qfuse.lower.leftovers import reason_to_stay
from qfuse.lower.norm_kernel import norm_problem_of
from qfuse.lower.table import choose
from qfuse.rewrite.driver import Context
from qfuse.rewrite.rewriter import GraphEditor
from qfuse.rewrite.settle import settle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from qfuse.cost.model import CostModel
    from qfuse.ir.epilogue import Epilogue
    from qfuse.ir.fused_views import FusedNorm
    from qfuse.lower.kernel import Claim, LinearKernel
    from qfuse.lower.norm_kernel import NormClaim, NormKernel
    from qfuse.lower.table import Choice
    from qfuse.rewrite.rewriter import Rewriter
    from qfuse.targets.target import Target

__all__ = ["lower"]

P = TypeVar("P", bound=Problem)
C = TypeVar("C", bound=Priced)
R = TypeVar("R")

_NO_KERNEL = "no kernel takes it"


def lower(
    program: OptimizedGraph,
    target: Target,
    cost: CostModel,
    kernels: Sequence[LinearKernel],
    context: Context | None = None,
    *,
    norm_kernels: Sequence[NormKernel] = (),
) -> LoweredGraph:
    """Lower ``program``, which is consumed, for ``target``.

    Args:
        program: The graph.
        target: Where it will run.
        cost: Prices the kernels.
        kernels: The rows of the table of linears, in the order that breaks ties.
        context: Permissions and proof; only its room's name differs from the default.
        norm_kernels: The rows of the table of norms.
    """
    context = context or Context("lower")
    _Lowering(program, target, cost, kernels, norm_kernels, context).run()
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
        norm_kernels: Sequence[NormKernel],
        context: Context,
    ) -> None:
        self._program = program
        self._target = target
        self._cost = cost
        self._kernels = kernels
        self._norm_kernels = norm_kernels
        self._context = context
        self._editor = GraphEditor(program.module)
        self._expander = Expander()

    def run(self) -> None:
        # Reasons are read off the whole graph, before any of it is gone.
        for node in self._program.graph.nodes:
            if is_call(node, ops.quantize, ops.dequantize, ops.requantize):
                reason = reason_to_stay(node)
                self._program.log.add(Left(self._context.room, place_of(node), reason))
        for node in list(self._program.graph.nodes):
            fused = as_fused_linear(node)
            if fused is not None:
                self._lower_linear(fused)
        lower_int_products(self._program, self._target, self._editor, self._context)
        # Last, since kernels read scales and zero points that are still canonical.
        for node in list(self._program.graph.nodes):
            if (norm := as_fused_norm(node)) is not None:
                self._lower_norm(norm)
            elif (activation := as_activation(node)) is not None:
                what, place = describe_result(activation), place_of(node)
                event = Lowered(self._context.room, place, "expand", what, why=_NO_KERNEL)
                self._program.log.add(event)
                self._expand(node)
            elif is_call(node, *ops.CANONICAL):
                self._expand(node)

    def _lower_linear(self, fused: FusedLinear) -> None:
        problem = problem_of(fused, self._program.signature.symbols)

        def put(result: Node, claim: Claim, rw: Rewriter) -> None:
            rest = split_epilogue(problem, claim)[1]
            rw.replace(fused.node, self._finish(fused, result, rest, claim.output, rw))

        choice = choose(problem, self._kernels, self._target, self._cost)
        self._run_or_expand(fused.node, describe(fused), problem, choice, put)

    def _lower_norm(self, fused: FusedNorm) -> None:
        problem = norm_problem_of(fused, self._program.signature.symbols)

        def put(results: tuple[Node, ...], claim: NormClaim, rw: Rewriter) -> None:
            del claim
            for index, user in results_of(fused.node).items():
                rw.replace(user, results[index])

        choice = choose(problem, self._norm_kernels, self._target, self._cost)
        self._run_or_expand(fused.node, describe_result(fused), problem, choice, put)

    def _run_or_expand(
        self,
        node: Node,
        what: str,
        problem: P,
        choice: Choice[P, C, R],
        put: Callable[[R, C, Rewriter], None],
    ) -> None:
        """Run ``node`` on the chosen kernel, if it may be and its values hold; or expand it.

        Args:
            node: The op.
            what: The op in words.
            problem: The op as kernels see it.
            choice: The kernel.
            put: Lets the readers of ``node`` read what the kernel gives.
        """
        room, log, place = self._context.room, self._program.log, place_of(node)
        rule = f"lower-{problem.kind}"
        key = f"{room}/{rule}@{node.name}"
        if choice.kernel is not None and self._context.gate.allows(key):
            assert choice.claim is not None, "a chosen kernel has a claim"
            rw = self._editor.rewriter(rule, node)
            put(choice.kernel.emit(problem, choice.claim, rw), choice.claim, rw)
            # Noted first, since committing erases the op that the note describes.
            name, why = choice.kernel.name, choice.claim.note
            event = Lowered(room, place_of(node), name, what, choice.seconds, choice.losers, why)
            if settle(rw, self._context, log, key, Exactness.ROUNDING, place):
                log.add(event)
                return
        why = _NO_KERNEL if choice.kernel is None else "its kernel is not permitted"
        log.add(Lowered(room, place, "expand", what, None, choice.losers, why))
        self._expand(node)

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
        left = rw.call(ops.quantize, y, params.scale, params.zero_point, str(params.spec))
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
        key = f"{self._context.room}/expand@{node.name}"
        log, place = self._program.log, place_of(node)
        if not settle(rw, self._context, log, key, Exactness.EXACT, place):
            raise CheckError(
                f"{node.name}: the expansion of {node.target} gives other values than the op",
                where=str(place),
                fix="this is a bug of qfuse; please report it with the model",
            )
