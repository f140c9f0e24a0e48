"""A linear and the rowwise op that uses it, as seen by kernels that fuse both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from qfuse.ir.dtypes import FLOATS
from qfuse.ir.graph.stage_graph import SymbolRange
from qfuse.ir.ops.activation import Activation, as_activation
from qfuse.ir.ops.linear import FusedLinear, as_fused_linear
from qfuse.ir.ops.output import ExtraOutput
from qfuse.ir.ops.views import all_results_of, dtype_of, results_of, shape_of, tensor_of
from qfuse.ir.quant.spec import dtype_name
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import is_row_major, same_shape
from qfuse.lower.problems.epilogue_text import GluProduct, KernelEpilogue, product_of
from qfuse.lower.problems.linear import LinearProblem, linear_problem
from qfuse.lower.problems.problem import Problem, Replaced
from qfuse.lower.problems.rowwise import RowwiseProblem, rowwise_problem
from qfuse.lower.problems.span import LINEAR_ROWWISE, Span
from qfuse.rewrite.prelude import Node

_SPREAD = "an operand is broadcast to the result, or the result to it"


@dataclass(frozen=True, slots=True)
class LinearRowwiseProblem(Problem):
    """A linear, and the rowwise op that uses it.

    Attributes:
        problem: The linear, with the epilogue operands of both and the output parameters of the
            op. Its node is the first result of the op.
        linear: The linear alone.
        op: The rowwise op.
        rows: How rows are quantized; ``None`` if the result is float.
        steps: The epilogue ops of both, in the syntax of the kernels.
        halved: Whether there is a GLU of the halves of the linear's features.
        shared: Whether the linear has other users; its float result is then an extra output.
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
        """The op; or the linear if it has other users, since they may precede the op."""
        return self.linear.node if self.shared else self.op.node

    @property
    def replaced(self) -> tuple[Replaced, ...]:
        """The results of the op, and that of the linear if it is shared."""
        results = [Replaced(node, index) for index, node in all_results_of(self.op.node)]
        if self.shared:
            results.append(Replaced(self.linear.node, self.kept_at, frozenset({self.op.node})))
        return tuple(results)

    def label(self, kernel: str) -> str:
        """Return the report's name for ``kernel`` fused over both."""
        return f"{kernel} with the linear"

    @property
    def columns(self) -> int:
        """Number of features of the result."""
        return self.problem.n // 2 if self.halved else self.problem.n

    @property
    def kept_at(self) -> int:
        """The result index of the linear's own result, if it is shared."""
        assert self.rows is not None, "a shared linear needs a quantized result"
        return self.rows.output.place(ExtraOutput.FLOAT)


def linear_rowwise_problem(
    node: Node, symbols: Mapping[str, SymbolRange]
) -> LinearRowwiseProblem | Refusal | None:
    """View ``node`` as a rowwise op on a linear; ``None`` if the pattern's root did not match.

    The operand of the op is the linear, or the two halves of its features.

    Refuses: a linear with other users, unless the op only quantizes it dynamically; a linear with a
    quantized result; epilogue ops that no linear kernel supports; operands that are broadcast, or
    that broadcast the result; results that are not row-major.
    """
    op = as_activation(node)
    if op is None:
        return None
    product = product_of(op)
    linear = as_fused_linear(op.x if product is None else product.split.source)
    if linear is None:
        return None
    shared = product is None and set(linear.node.users) != {op.node}
    written = _check_between(linear, op, product) or KernelEpilogue.of(linear, op, product)
    if isinstance(written, Refusal):
        return written
    refusal = _check_shapes(linear, op, written)
    if refusal is not None:
        return refusal
    rows = _rows_of(op, symbols, shared=shared)
    if isinstance(rows, Refusal):
        return rows
    # `_check_between` has refused an op whose first result has no user.
    first = results_of(node)[0]
    both = replace(linear, node=first, extras=written.extras, out_params=op.output.params)
    problem = linear_problem(both, symbols)
    return LinearRowwiseProblem(problem, linear, op, rows, written.text, written.halved, shared)


def _rows_of(
    op: Activation, symbols: Mapping[str, SymbolRange], *, shared: bool
) -> RowwiseProblem | Refusal | None:
    """Return how rows are quantized, with extra outputs; ``None`` if the result is float."""
    if op.output.spec is None:
        return None
    # Where the op only quantizes, its float result is that of the linear.
    keep = op.output.keep | ({ExtraOutput.FLOAT} if shared else set())
    return rowwise_problem(replace(op, output=replace(op.output, keep=keep)), symbols)


def _check_between(
    linear: FusedLinear, op: Activation, product: GluProduct | None
) -> Refusal | None:
    """Refuse intermediate values that are quantized or have other users."""
    if linear.out_params is not None or op.x_params is not None:
        return Refusal("the value between the two is quantized")
    between = frozenset({linear.node}) if product is None else product.between | {linear.node}
    outside = {user for node in between for user in node.users} - between - {op.node}
    reads = [node for node in (op.x, *op.extras) if node in between]
    # The extra output of the linear is written as rows.
    keeps = (
        product is None
        and op.output.choose is not None
        and not op.epilogue.ops
        and is_row_major(tensor_of(linear.node))
    )
    # The value between the two is never stored, so nobody else can read it.
    if (outside and not keeps) or len(reads) != (1 if product is None else 2):
        return Refusal("the linear has other users, or the op uses it more than once")
    return None if 0 in results_of(op.node) else Refusal("the result has no user")


def _check_shapes(linear: FusedLinear, op: Activation, written: KernelEpilogue) -> Refusal | None:
    """Refuse operands of the op that do not have the shape of its result."""
    values = op.node.meta["val"]
    features = shape_of(linear.weight)[0]
    columns = features // 2 if written.halved else features
    # An operand of the linear must not broadcast the linear's result either.
    if not same_shape((*shape_of(linear.x)[:-1], columns), values[0].shape):
        return Refusal(_SPREAD)
    for extra in written.extras:
        # Operands of the linear's own epilogue are checked with the kernel of the linear.
        if extra not in op.extras:
            continue
        if dtype_of(extra) not in FLOATS:
            return Refusal(f"an operand is {dtype_name(dtype_of(extra))}")
        if not same_shape(shape_of(extra), values[0].shape):
            return Refusal(_SPREAD)
    if not all(map(is_row_major, values)):
        return Refusal("its results are not row-major")
    return None
