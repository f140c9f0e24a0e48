"""Rowwise ops with a fused quantize, as seen by the rowwise kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.cost import pointwise_work, size_range, without_calls
from qfuse.cost.model import Workload
from qfuse.cost.sizes import SizeRange
from qfuse.cost.work import WorkRange
from qfuse.ir.dtypes import FLOATS, bit_width
from qfuse.ir.graph.stage_graph import SymbolRange
from qfuse.ir.ops.activation import Activation
from qfuse.ir.ops.norms import LayerNorm, RmsNorm
from qfuse.ir.ops.output import ExtraOutput, Output
from qfuse.ir.ops.views import QuantParams, all_results_of, dtype_of, results_of, shape_of
from qfuse.ir.quant.spec import QuantSpec, dtype_name
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import Size, is_row_major, product, same_shape
from qfuse.lower.problems.claim import Claim
from qfuse.lower.problems.problem import Problem, Replaced
from qfuse.lower.problems.span import Span
from qfuse.rewrite.prelude import Node, Rewriter

RowwiseOp = RmsNorm | LayerNorm | Activation


# Result index of the extra outputs; quantized values, scale and zero point come first.
_KEPT = {ExtraOutput.FLOAT: 3, ExtraOutput.SUM: 4}


@dataclass(frozen=True, slots=True)
class RowwiseProblem(Problem):
    """A fused op as rowwise kernels see it.

    Attributes:
        op: The view of the op.
        spec: The quantization of its result.
        elements: Number of elements of the input.
        made: Number of elements of the result: half of the input's with a GLU.
        shape: Shape of the result.
    """

    op: RowwiseOp
    spec: QuantSpec
    elements: SizeRange
    made: SizeRange
    shape: tuple[Size, ...]

    rule: ClassVar[str] = "lower-rowwise"
    has_rival: ClassVar[bool] = True

    @property
    def span(self) -> Span:
        """The op."""
        return (type(self.op),)

    @property
    def place(self) -> Node:
        """The op."""
        return self.op.node

    @property
    def anchor(self) -> Node:
        """The op."""
        return self.op.node

    @property
    def replaced(self) -> tuple[Replaced, ...]:
        """The results of the op."""
        return tuple(Replaced(node, index) for index, node in all_results_of(self.op.node))

    @property
    def output(self) -> Output:
        """The output arguments."""
        return self.op.output

    @property
    def is_row_major(self) -> bool:
        """Whether all results are row-major."""
        return all(map(is_row_major, self.op.node.meta["val"]))

    @property
    def operands(self) -> tuple[Node, ...]:
        """The elementwise operands besides the input."""
        if isinstance(self.op, Activation):
            # The parameters of intermediate roundings are not rows.
            read = self.op.extras
            return tuple(x for x in read if same_shape(shape_of(x), shape_of(self.op.x)))
        return () if self.op.residual is None else (self.op.residual,)

    def kernel_result(self, index: int) -> int:
        """Return the kernel's result index for the op's result ``index``."""
        for kept in self.output.keep:
            if index == self.output.place(kept):
                return _KEPT[kept]
        return index

    def results(self, call: Node, rw: Rewriter) -> dict[int, Node]:
        """Return the results of a kernel call, by the result index of the op."""
        indices = results_of(self.op.node)
        return {index: rw.item(call, self.kernel_result(index)) for index in indices}

    def claim(self, statistics: int) -> Claim:
        """Return the claim of a kernel that computes ``statistics`` statistics of a row.

        Compiled loops read a row once per statistic, once for the extremes of dynamic parameters,
        and once to quantize.
        """
        extremes = 0 if self.output.choose is None else 1
        count = statistics + extremes + 1
        return Claim(0, True, self.once(), loops=self.passes(count))

    def once(self) -> Workload:
        """Return the work of a kernel, which reads all operands once, in one call."""
        return [*self._reads(), without_calls(self._written())]

    def passes(self, count: int) -> Workload:
        """Return the work of compiled loops that read all operands ``count`` times."""
        loops = [*self._reads() * count, self._written()]
        return [without_calls(work) for work in loops]

    def _reads(self) -> list[WorkRange]:
        bits = [bit_width(dtype_of(node)) for node in (self.op.x, *self.operands)]
        return [pointwise_work(self.elements, bits, [])]

    def _written(self) -> WorkRange:
        op = self.op
        real = _float_dtype(op.x, op.x_params)
        kept = {ExtraOutput.FLOAT: self.spec.float_dtype, ExtraOutput.SUM: real}
        if not isinstance(op, Activation) and op.residual is not None:
            other = _float_dtype(op.residual, op.residual_params)
            # torch promotes a bfloat16 hidden state plus a float32 residual to float32.
            kept[ExtraOutput.SUM] = torch.promote_types(real, other)
        bits = [bit_width(self.spec.dtype), *(bit_width(kept[k]) for k in self.output.keep)]
        return pointwise_work(self.made, [], bits)


def _float_dtype(x: Node, params: QuantParams | None) -> torch.dtype:
    return dtype_of(x) if params is None else params.spec.float_dtype


def rowwise_problem(op: RowwiseOp, symbols: Mapping[str, SymbolRange]) -> RowwiseProblem | Refusal:
    """Describe ``op``, or refuse ops that no rowwise kernel supports."""
    shape = shape_of(op.x)
    if op.output.spec is None:
        return Refusal("its result is not quantized")
    real = _float_dtype(op.x, op.x_params)
    if real not in FLOATS:
        return Refusal(f"its input is {dtype_name(real)}")
    if not shape:
        return Refusal("its input has no axis")
    made = tuple(op.node.meta["val"][0].shape)
    read, written = (size_range(product(sizes), symbols) for sizes in (shape, made))
    return RowwiseProblem(op, op.output.spec, read, written, made)


def loops_of(op: RowwiseOp, symbols: Mapping[str, SymbolRange]) -> Workload:
    """Return the work of compiled loops with a float result, without a call."""
    value = op.node.meta["val"][0]
    read, written = (size_range(product(sizes), symbols) for sizes in (shape_of(op.x), value.shape))
    works = [
        pointwise_work(read, [bit_width(dtype_of(op.x))], []),
        pointwise_work(written, [], [bit_width(value.dtype)]),
    ]
    return [without_calls(work) for work in works]
