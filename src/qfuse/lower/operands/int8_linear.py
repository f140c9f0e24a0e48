"""Shared code of qfuse's linears with quantized activations, alone and fused with a rowwise op."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch.fx.node import Argument

from qfuse.cost.sizes import AtPoints, at_points
from qfuse.cost.work import Bits, ComputeKind, Work, WorkRange, linear_work
from qfuse.ir.dtypes import bit_width
from qfuse.ir.refusal import Refusal
from qfuse.lower.operands.checks import (
    check_epilogue_operands,
    float_out,
    output_args,
    takes_output,
)
from qfuse.lower.operands.epilogue import (
    kernel_epilogue,
)
from qfuse.lower.operands.int8_kernel import Int8Kernel
from qfuse.lower.operands.rowwise import rowwise_output_args
from qfuse.lower.operands.rowwise_conditions import output_conditions
from qfuse.lower.problems.claim import Claim
from qfuse.lower.problems.conditions import Condition, Conditions, hold, on
from qfuse.lower.problems.epilogue_text import KernelEpilogue
from qfuse.lower.problems.linear import LinearProblem
from qfuse.lower.problems.linear_rowwise import LinearRowwiseProblem
from qfuse.lower.problems.rowwise import RowwiseProblem
from qfuse.lower.problems.span import LINEAR, LINEAR_ROWWISE, Span
from qfuse.rewrite.prelude import Node, Rewriter

# An upper bound: the kernel's own tiles are smaller.
_PIECES = 64
_ONE_PASS = "the linear and the following op are one pass"


@dataclass(frozen=True, slots=True)
class Int8Linear(Int8Kernel):
    """A linear of quantized activations.

    It has a third op: ``qfuse::name_rows`` returns the quantized values of a fused rowwise op.
    """

    covers: ClassVar[tuple[Span, ...]] = (LINEAR, LINEAR_ROWWISE)

    @property
    @abstractmethod
    def weight_bits(self) -> int:
        """Bits per weight."""

    @property
    @abstractmethod
    def requires(self) -> tuple[Condition[LinearProblem], ...]:
        """The conditions on the operands; those on an epilogue and output of rows are added."""

    @abstractmethod
    def weight_operands(
        self, problem: LinearProblem, rw: Rewriter, *, halves: bool
    ) -> list[Argument]:
        """Emit the packed constants; return the arguments between the activation and the bias.

        Args:
            problem: The accepted linear.
            rw: Adds constants.
            halves: Whether the epilogue has a GLU, which multiplies the halves of the features.
        """

    def depth(self, problem: LinearProblem) -> int:
        """Return the input features, plus overhead in units of one feature."""
        return problem.k

    def conditions(self, problem: LinearProblem | LinearRowwiseProblem) -> Conditions:
        """Return those on the operands, and those on the output of a fused rowwise op."""
        if not isinstance(problem, LinearRowwiseProblem):
            return self.requires
        both = on(_linear_of, (*self.requires, _EPILOGUE))
        if problem.rows is None or is_stored_at_once(problem):
            return both
        return (*both, *on(_rows_of, output_conditions(problem.rows)))

    def accepts(self, problem: LinearProblem | LinearRowwiseProblem) -> Claim | Refusal:
        """Accept the linear with its leading epilogue ops, or with the following rowwise op."""
        refusal = hold(self.conditions(problem), problem)
        if refusal is not None:
            return refusal
        if isinstance(problem, LinearRowwiseProblem):
            depth = self.depth(problem.problem)
            work = linear_rowwise_work(problem, depth, self.weight_bits)
            # No steps are counted: the text of the problem has
            # those of both ops, and none may be left over.
            return Claim(0, problem.rows is not None, work, _ONE_PASS)
        return self.claim(problem, partial(self._work, problem))

    def emit(
        self, problem: LinearProblem | LinearRowwiseProblem, claim: Claim, rw: Rewriter
    ) -> dict[int, Node]:
        """Emit the call with packed constants."""
        if isinstance(problem, LinearRowwiseProblem):
            return self._emit_rowwise(problem, rw)
        args = self._arguments(problem, kernel_epilogue(problem, claim), rw)
        return {0: self.call(problem, claim, args, rw)}

    def _emit_rowwise(self, problem: LinearRowwiseProblem, rw: Rewriter) -> dict[int, Node]:
        fused, rows = problem.problem.fused, problem.rows
        steps = KernelEpilogue(problem.steps, fused.extras, problem.halved)
        args = self._arguments(problem.problem, steps, rw)
        if rows is None:
            return {0: rw.call(self.op(), *args, float_out(fused))}
        if is_stored_at_once(problem):
            assert fused.out_params is not None, "its parameters are given"
            return {0: rw.call(self.op("_quantized"), *args, *output_args(fused.out_params, rw))}
        call = rw.call(self.op("_rows"), *args, rows.spec.float_dtype, *rowwise_output_args(rows))
        indices = [replaced.index for replaced in problem.replaced]
        return {index: rw.item(call, rows.kernel_result(index)) for index in indices}

    def _arguments(
        self, problem: LinearProblem, steps: KernelEpilogue, rw: Rewriter
    ) -> list[Argument]:
        """Return the leading arguments, which the three ops share."""
        return [
            *self.activation_arguments(problem, rw),
            *self.weight_operands(problem, rw, halves=steps.halved),
            *self.epilogue_arguments(problem, steps, rw, []),
        ]

    def _work(self, problem: LinearProblem, out_bits: int) -> list[WorkRange]:
        bits = Bits(8, self.weight_bits, out_bits)
        depth = self.depth(problem)
        return [linear_work(problem.rows, depth, problem.n, bits, ComputeKind.INT8)]


def _linear_of(problem: LinearRowwiseProblem) -> LinearProblem:
    return problem.problem


def _rows_of(problem: LinearRowwiseProblem) -> RowwiseProblem:
    assert problem.rows is not None, "its result is quantized"
    return problem.rows


_EPILOGUE: Condition[LinearProblem] = Condition(
    "the operands of the epilogue are floats of at most 32 bits", check_epilogue_operands
)


def is_stored_at_once(problem: LinearRowwiseProblem) -> bool:
    """Whether a block of columns can be quantized without the rest of its row."""
    fused = problem.problem.fused
    # An extra float output has to be written as rows too, which only the `_rows` op does.
    given = fused.out_params is not None and not problem.op.output.keep
    return given and takes_output(fused)


def linear_rowwise_work(
    both: LinearRowwiseProblem, depth: int, weight_bits: int
) -> list[AtPoints[Work]]:
    """Return the work of the linear, and of quantizing strips of rows that are in a cache.

    Args:
        both: The linear and the rowwise op.
        depth: Input features, plus overhead in units of one feature.
        weight_bits: Bits per weight.
    """
    problem, columns, rows = both.problem, both.columns, both.rows
    stored = rows is not None and is_stored_at_once(both)
    in_strips = rows is not None and not stored
    kept = rows is not None and bool(rows.output.keep)
    # The first result is quantized; the extra outputs have the float dtype before that.
    bits = (
        8
        if stored
        else bit_width(float_out(problem.fused) if rows is None else rows.spec.float_dtype)
    )

    def linear(count: int) -> Work:
        stored_as = Bits(8, weight_bits, 0)
        # The sizes are numbers here, so the work is the same at all three points.
        work = linear_work(count, depth, problem.n, stored_as, ComputeKind.INT8).hint
        written = _strips(count * columns) if in_strips else (count * columns * bits / 8,)
        return work.moving(writes=written)

    def encoding(count: int) -> Work:
        size = count * columns
        written = (size, *([size * bits / 8] if kept else []))
        return Work(reads=_strips(size), writes=written, kernel_calls=0)

    plan = [at_points(linear, problem.rows)]
    return [*plan, at_points(encoding, problem.rows)] if in_strips else plan


def _strips(elements: int) -> tuple[float, ...]:
    """Return the traffic of floats in tiles, which stay in a cache whatever their total size is."""
    return (elements * 4 / _PIECES,) * _PIECES
