"""A linear and the op of rows that alone reads it, as kernels that run both in one pass see them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from qfuse.ir.epilogue import Act, Add, Cast, Epilogue, Glu, Mul
from qfuse.ir.fused_views import as_activation
from qfuse.ir.quant_spec import dtype_name
from qfuse.ir.sizes import is_row_major, same_shape
from qfuse.ir.views import as_fused_linear, dtype_of, shape_of
from qfuse.lower.expand import results_of
from qfuse.lower.kernel import LinearKernel, LinearProblem, Refusal, problem_of
from qfuse.lower.operands import FLOATS, MOST_EXTRAS, MOST_STEPS
from qfuse.lower.row_problem import RowProblem, row_problem_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.fx import Node

    from qfuse.ir.epilogue import Step
    from qfuse.ir.fused_views import Activation
    from qfuse.ir.program import SymbolRange
    from qfuse.ir.views import FusedLinear
    from qfuse.lower.kernel import Claim
    from qfuse.rewrite.rewriter import Rewriter

__all__ = ["Pair", "PairKernel", "glu_of", "pair_of"]


@dataclass(frozen=True, slots=True)
class Pair:
    """A linear with the steps, and with given parameters, of the op behind it.

    Attributes:
        problem: The linear that both are; its node is the first result of the op.
        linear: The linear alone.
        op: The op behind it.
        rows: How rows become codes; ``None`` if the result is float.
    """

    problem: LinearProblem
    linear: FusedLinear
    op: Activation
    rows: RowProblem | None

    @property
    def columns(self) -> int:
        """Features of the result."""
        return self.problem.n if glu_of(self.problem.fused) is None else self.problem.n // 2


@runtime_checkable
class PairKernel(LinearKernel, Protocol):
    """A row of the table of linears that also takes the op behind one, whole or not at all."""

    def accepts_pair(self, pair: Pair) -> Claim | Refusal:
        """Return what it costs to run both, or why it does not."""

    def emit_pair(self, pair: Pair, rw: Rewriter) -> dict[int, Node]:
        """Add the call; return the results of the op by index."""


def glu_of(fused: FusedLinear) -> Glu | None:
    """Return the step that multiplies the halves, if there is one."""
    return next((step for step in fused.epilogue.steps if isinstance(step, Glu)), None)


def pair_of(node: Node, symbols: Mapping[str, SymbolRange]) -> Pair | Refusal | None:
    """View ``node`` as the op behind a linear; ``None`` if it is no such op.

    Refuses: a linear that others read, or whose result is stored; steps that no kernel of linears
    knows; operands that are spread, or that spread the result; results in another order than rows.
    """
    op = as_activation(node)
    linear = None if op is None else as_fused_linear(op.x)
    if op is None or linear is None:
        return None
    refusal = _check_between(linear, op) or _check_steps(linear, op) or _check_shapes(op)
    if refusal is not None:
        return refusal
    rows = None if op.output.spec is None else row_problem_of(op, symbols)
    if isinstance(rows, Refusal):
        return rows
    both = replace(
        linear,
        node=results_of(node)[0],
        epilogue=Epilogue((*linear.epilogue.steps, *_shifted(op, len(linear.extras)))),
        extras=(*linear.extras, *op.extras),
        out_params=op.output.params,
    )
    return Pair(problem_of(both, symbols), linear, op, rows)


def _check_between(linear: FusedLinear, op: Activation) -> Refusal | None:
    """Refuse what is not only between the two."""
    if linear.out_params is not None or op.x_params is not None:
        return Refusal("what is between the two is stored")
    if set(linear.node.users) != {op.node} or linear.node in op.extras:
        return Refusal("others read the linear too")
    if 0 not in results_of(op.node):
        return Refusal("nobody reads the result")
    return None


def _check_steps(linear: FusedLinear, op: Activation) -> Refusal | None:
    steps = (*linear.epilogue.steps, *op.epilogue.steps)
    if len(steps) > MOST_STEPS or len(linear.extras) + len(op.extras) > MOST_EXTRAS:
        return Refusal("the two have too many steps")
    halving = [step for step in steps if isinstance(step, Glu)]
    if len(halving) > 1 or not all(map(_is_known, steps)):
        return Refusal("it halves rows twice, or rounds on the way")
    if halving and shape_of(linear.weight)[0] % 2:
        return Refusal("the halves of its rows are not alike")
    return None


def _is_known(step: Step) -> bool:
    return isinstance(step, (Act, Add, Cast, Glu)) or (
        isinstance(step, Mul) and step.rounded is None
    )


def _check_shapes(op: Activation) -> Refusal | None:
    """Refuse operands that are not as large as the result, one number for one."""
    values = op.node.meta["val"]
    halved = any(isinstance(step, Glu) for step in op.epilogue.steps)
    if halved and op.extras and not isinstance(op.epilogue.steps[0], Glu):
        return Refusal("its operands are read before the halves are multiplied")
    for extra in op.extras:
        if dtype_of(extra) not in FLOATS:
            return Refusal(f"an operand is {dtype_name(dtype_of(extra))}")
        if not same_shape(shape_of(extra), values[0].shape):
            return Refusal("an operand is spread over the result, or the result over it")
    if not all(map(is_row_major, values)):
        return Refusal("its results lie in memory in another order than rows")
    return None


def _shifted(op: Activation, by: int) -> list[Step]:
    """Return the steps of the op with its operands numbered behind those of the linear."""
    return [
        replace(step, index=step.index + by) if isinstance(step, (Add, Mul)) else step
        for step in op.epilogue.steps
    ]
