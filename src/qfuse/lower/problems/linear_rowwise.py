"""A linear and the op of rows that alone reads it, as kernels see them that run both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from qfuse.ir.graph.stage_graph import SymbolRange
from qfuse.ir.ops.activation import Activation, as_activation
from qfuse.ir.ops.linear import FusedLinear, as_fused_linear
from qfuse.ir.ops.output import Keep
from qfuse.ir.ops.views import dtype_of, shape_of, tensor_of
from qfuse.ir.quant.spec import dtype_name
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import is_row_major, same_shape
from qfuse.lower.expand.expand import results_of
from qfuse.lower.operands.checks import FLOATS
from qfuse.lower.problems.epilogue_text import KernelSteps, Product, product_of
from qfuse.lower.problems.linear import LinearProblem, linear_problem
from qfuse.lower.problems.problem import Problem, Replaced
from qfuse.lower.problems.rowwise import RowwiseProblem, rowwise_problem
from qfuse.lower.select.kernel import LINEAR_ROWWISE, Span
from qfuse.rewrite.prelude import Node

_SPREAD = "an operand is spread over the result, or the result over it"


@dataclass(frozen=True, slots=True)
class LinearRowwiseProblem(Problem):
    """A linear, and the op behind it.

    Attributes:
        problem: The linear, with the operands that the steps of both read, and with what the op is
            given to store its result by. Its node is the first result of the op.
        linear: The linear alone.
        op: The op behind it.
        rows: How rows become codes; ``None`` if the result is float.
        steps: Those of both, in the words of the kernels.
        halved: Whether the halves of the linear's features are multiplied.
        shared: Whether others read the linear too, whose float result is kept for them then.
    """

    problem: LinearProblem
    linear: FusedLinear
    op: Activation
    rows: RowwiseProblem | None
    steps: str
    halved: bool
    shared: bool

    rule: ClassVar[str] = "lower-linear-rowwise"
    has_rival: ClassVar[bool] = True

    @property
    def span(self) -> Span:
        """A linear and a rowwise op."""
        return LINEAR_ROWWISE

    @property
    def place(self) -> Node:
        """The linear."""
        return self.linear.node

    @property
    def anchor(self) -> Node:
        """The op; the linear if it has other users, which may come before the op."""
        return self.linear.node if self.shared else self.op.node

    @property
    def replaced(self) -> tuple[Replaced, ...]:
        """The results of the op, and that of the linear if it is shared."""
        results = [Replaced(node, index) for index, node in results_of(self.op.node).items()]
        if self.shared:
            results.append(Replaced(self.linear.node, self.kept_at, frozenset({self.op.node})))
        return tuple(results)

    def label(self, kernel: str) -> str:
        """Say that it is about both."""
        return f"{kernel} with the linear"

    @property
    def columns(self) -> int:
        """Features of the result."""
        return self.problem.n // 2 if self.halved else self.problem.n

    @property
    def kept_at(self) -> int:
        """Which result of the op the linear's own is, if it is shared."""
        assert self.rows is not None, "what is shared is stored"
        return self.rows.output.place(Keep.FLOAT)


def linear_rowwise_problem(
    node: Node, symbols: Mapping[str, SymbolRange]
) -> LinearRowwiseProblem | Refusal | None:
    """View ``node`` as the op behind a linear; ``None`` if it is no such op.

    The op reads the linear, or the two halves of its features.

    Refuses: a linear that others read, unless all that the op does is to choose scales for what
    they read; one whose result is stored; steps that no kernel of linears
    knows; operands that are spread, or that spread the result; results in another order than rows.
    """
    op = as_activation(node)
    if op is None:
        return None
    product = product_of(op)
    linear = as_fused_linear(op.x if product is None else product.halves.source)
    if linear is None:
        return None
    shared = product is None and set(linear.node.users) != {op.node}
    written = _check_between(linear, op, product) or KernelSteps.of(linear, op, product)
    if isinstance(written, Refusal):
        return written
    refusal = _check_shapes(linear, op, written)
    if refusal is not None:
        return refusal
    rows = _rows_of(op, symbols, shared=shared)
    if isinstance(rows, Refusal):
        return rows
    first = results_of(node)[0]
    both = replace(linear, node=first, extras=written.extras, out_params=op.output.params)
    problem = linear_problem(both, symbols)
    return LinearRowwiseProblem(problem, linear, op, rows, written.text, written.halved, shared)


def _rows_of(
    op: Activation, symbols: Mapping[str, SymbolRange], *, shared: bool
) -> RowwiseProblem | Refusal | None:
    """Return how rows become codes, and what else is given; ``None`` if the result is float."""
    if op.output.spec is None:
        return None
    keep = op.output.keep | ({Keep.FLOAT} if shared else set())
    return rowwise_problem(replace(op, output=replace(op.output, keep=keep)), symbols)


def _check_between(linear: FusedLinear, op: Activation, product: Product | None) -> Refusal | None:
    """Refuse what is not only between the two."""
    if linear.out_params is not None or op.x_params is not None:
        return Refusal("what is between the two is stored")
    between = frozenset({linear.node}) if product is None else product.between | {linear.node}
    outside = {user for node in between for user in node.users} - between - {op.node}
    reads = [node for node in (op.x, *op.extras) if node in between]
    # What is kept lies in memory as rows do.
    keeps = (
        product is None
        and op.output.choose is not None
        and not op.epilogue.steps
        and is_row_major(tensor_of(linear.node))
    )
    if (outside and not keeps) or len(reads) != (1 if product is None else 2):
        return Refusal("others read the linear too, or the op reads it more than once")
    return None if 0 in results_of(op.node) else Refusal("nobody reads the result")


def _check_shapes(linear: FusedLinear, op: Activation, written: KernelSteps) -> Refusal | None:
    """Refuse operands of the op that are not as large as its result, one number for one."""
    values = op.node.meta["val"]
    features = shape_of(linear.weight)[0]
    columns = features // 2 if written.halved else features
    # Nor may an operand of the linear spread what the linear computes.
    if not same_shape((*shape_of(linear.x)[:-1], columns), values[0].shape):
        return Refusal(_SPREAD)
    for extra in written.extras:
        if extra not in op.extras:
            continue
        if dtype_of(extra) not in FLOATS:
            return Refusal(f"an operand is {dtype_name(dtype_of(extra))}")
        if not same_shape(shape_of(extra), values[0].shape):
            return Refusal(_SPREAD)
    if not all(map(is_row_major, values)):
        return Refusal("its results lie in memory in another order than rows")
    return None
