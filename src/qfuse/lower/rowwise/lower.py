"""Lower norms and activations that give codes: to a kernel, or to what a compiler makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qfuse.cost import seconds_text
from qfuse.ir.events import Lowered
from qfuse.ir.graph.stage_graph import op_name, place_of
from qfuse.ir.ops.activation import Activation, as_activation
from qfuse.ir.ops.norms import as_fused_norm
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.quant.spec import Granularity, dtype_name, stored_name
from qfuse.lower.expand.describe import granularity_of
from qfuse.lower.expand.expand import results_of
from qfuse.lower.kernel.context import LoweringContext
from qfuse.lower.kernel.protocol import Refusal
from qfuse.lower.rowwise.problem import RowKernel, RowOp, RowProblem, loops_of, row_problem_of
from qfuse.rewrite.commit import verify_and_commit
from qfuse.rewrite.prelude import Exactness, Node

Offer = tuple["RowKernel", RowProblem, float]


def lower_rows(
    bench: LoweringContext,
    kernels: Sequence[RowKernel],
    apart: Mapping[Node, tuple[tuple[str, str], ...]],
) -> None:
    """Replace the fused ops that a kernel takes and runs faster; say of the others why not.

    Of some it is known why they stay apart from the linear in front of them, which is said too.

    What is left is expanded with everything else. A compiler makes loops of that, which read a row
    once for every statistic, but are no call of their own: on few rows they are faster.
    """
    by_op = {kernel.op: kernel for kernel in kernels}
    for node in list(bench.program.graph.nodes):
        op = as_fused_norm(node) or as_activation(node)
        if op is None:
            continue
        kernel = by_op.get(type(op))
        answer = _offer(op, kernel, bench)
        key = f"{bench.context.stage}/lower-rows@{node.name}"
        if not isinstance(answer, Refusal):
            if not bench.context.budget.allows(key):
                answer = Refusal("it is not permitted")
            else:
                event = _emit(answer, key, bench, apart.get(node, ()))
                if event is not None:
                    bench.program.log.add(event)
                    continue
                answer = Refusal("it was rolled back here")
        losers = () if kernel is None else ((kernel.name, answer.reason),)
        losers = (*losers, *apart.get(node, ()))
        why = "it compiles to loops with what is around it"
        event = Lowered(
            bench.context.stage, place_of(node), "expand", _describe(op), losers=losers, why=why
        )
        bench.program.log.add(event)


def _offer(op: RowOp, kernel: RowKernel | None, bench: LoweringContext) -> Offer | Refusal:
    """Return the kernel with its price, if it takes the op and pays."""
    if kernel is None:
        return Refusal("there is no kernel of this op")
    problem = row_problem_of(op, bench.symbols)
    if isinstance(problem, Refusal):
        return problem
    answer = kernel.supported(bench.target) or kernel.accepts(problem)
    if isinstance(answer, Refusal):
        return answer
    mine, theirs = bench.cost.seconds(problem.once()), bench.cost.seconds(problem.passes(answer))
    if mine < theirs:
        return kernel, problem, mine
    return Refusal(f"predicted {seconds_text(mine)}, compiled loops {seconds_text(theirs)}")


def seconds_of_rows(op: RowOp, kernels: Sequence[RowKernel], bench: LoweringContext) -> float:
    """Predict an op alone: on a kernel, or in a compiler's loops if they are faster."""
    problem = row_problem_of(op, bench.symbols)
    if isinstance(problem, Refusal):
        return bench.cost.seconds(loops_of(op, bench.symbols))
    kernel = next((row for row in kernels if row.op is type(op)), None)
    answer = _offer(op, kernel, bench)
    if not isinstance(answer, Refusal):
        return answer[2]
    return bench.cost.seconds(problem.passes(1 if op.output.choose is None else 2))


def _emit(
    offer: Offer, key: str, bench: LoweringContext, losers: tuple[tuple[str, str], ...]
) -> Lowered | None:
    """Replace the op by the kernel; return the event, or ``None`` if that did not hold."""
    kernel, problem, seconds = offer
    node = problem.op.node
    place, what = place_of(node), _describe(problem.op)
    rw = bench.editor.rewriter("lower-rows", node)
    call = kernel.emit(problem, rw)
    for index, result in results_of(node).items():
        rw.replace(result, rw.item(call, problem.kernel_result(index)))
    if not verify_and_commit(rw, bench.context, bench.program.log, key, Exactness.ROUNDING, place):
        return None
    return Lowered(bench.context.stage, place, kernel.name, what, seconds, losers)


def _describe(op: RowOp) -> str:
    """Say what becomes what: ``add + rms_norm: bfloat16 -> int8 per-token dynamic``."""
    if isinstance(op, Activation):
        name = str(op.epilogue) or "quantize"
    else:
        name = _name(op) if op.residual is None else f"add + {_name(op)}"
    text, spec = f"{name}: {dtype_name(dtype_of(op.x))}", op.output.spec
    if spec is None:
        return text
    granularity = granularity_of(spec, shape_of(op.x), Granularity.PER_TOKEN)
    how = "" if op.output.choose is None else " dynamic"
    return f"{text} -> {stored_name(spec.dtype, spec.element)} {granularity}{how}"


def _name(op: RowOp) -> str:
    return op_name(op.node).removeprefix("qfuse.")
