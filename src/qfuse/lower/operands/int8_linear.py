"""Shared code of qfuse's linears with quantized activations, alone and fused with a rowwise op."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx.node import Argument

from qfuse.cost.sizes import AtPoints, at_points
from qfuse.cost.work import Bits, ComputeKind, Work, WorkRange, linear_work
from qfuse.ir.dtypes import bit_width
from qfuse.ir.refusal import Refusal
from qfuse.kernels import KernelLibrary
from qfuse.lower.operands.checks import (
    check_extras,
    check_platform,
    float_out,
    output_args,
    scale_node,
    stored_zero,
    takes_output,
    typed,
)
from qfuse.lower.operands.epilogue import (
    claimed_dtype,
    claims_output,
    covered_steps,
    kernel_extras,
    kernel_steps,
    loops_behind,
)
from qfuse.lower.operands.packing import Packer
from qfuse.lower.operands.rowwise import check_output, rowwise_output_args
from qfuse.lower.problems.claim import Claim
from qfuse.lower.problems.epilogue_text import KernelSteps
from qfuse.lower.problems.linear import LinearProblem
from qfuse.lower.problems.linear_rowwise import LinearRowwiseProblem
from qfuse.lower.problems.span import LINEAR, LINEAR_ROWWISE, Span
from qfuse.rewrite.prelude import Node, OpOverload, Rewriter
from qfuse.targets.target import Target

# An upper bound: the kernel's own tiles are smaller.
_PIECES = 64
_ONE_PASS = "the linear and the following op are one pass"


@dataclass(frozen=True, slots=True)
class Int8Linear(ABC):
    """A linear of quantized activations, as three ops.

    ``qfuse::name`` returns floats, ``qfuse::name_quantized`` quantized values with static
    parameters, ``qfuse::name_rows`` the quantized values of a fused rowwise op.

    Attributes:
        library: The compiled kernels, or the reason why they are not available.
        packer: Packs weights; shared by all kernels of one lowering.
    """

    covers: ClassVar[tuple[Span, ...]] = (LINEAR, LINEAR_ROWWISE)

    library: KernelLibrary
    packer: Packer

    @property
    @abstractmethod
    def name(self) -> str:
        """The name in the report: ``qfuse.`` and the name of the first op."""

    @property
    @abstractmethod
    def weight_bits(self) -> int:
        """Bits per weight."""

    @abstractmethod
    def check(self, problem: LinearProblem) -> Refusal | None:
        """Refuse unsupported operands; epilogue and output are checked by the caller."""

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

    def supported(self, target: Target) -> Refusal | None:
        """Refuse if the kernels could not be built."""
        return check_platform(self.library, target)

    def accepts(self, problem: LinearProblem | LinearRowwiseProblem) -> Claim | Refusal:
        """Accept the linear with its leading epilogue ops, or with the following rowwise op."""
        if isinstance(problem, LinearRowwiseProblem):
            both = problem.problem
            refusal = self.check(both) or check_extras(both) or check_rowwise_output(problem)
            if refusal is not None:
                return refusal
            work = linear_rowwise_work(problem, self.depth(both), self.weight_bits)
            # No steps are counted: the text of the problem has
            # those of both ops, and none may be left over.
            return Claim(0, problem.rows is not None, work, _ONE_PASS)
        refusal = self.check(problem)
        if refusal is not None:
            return refusal
        steps = covered_steps(problem)
        output = claims_output(problem, steps)
        work = [*self._work(problem, output=output), *loops_behind(problem, steps)]
        return Claim(steps, output, work)

    def emit(
        self, problem: LinearProblem | LinearRowwiseProblem, claim: Claim, rw: Rewriter
    ) -> dict[int, Node]:
        """Emit the call with packed constants."""
        if isinstance(problem, LinearRowwiseProblem):
            return self._emit_rowwise(problem, rw)
        fused = problem.fused
        args = self._arguments(problem, kernel_steps(problem, claim), rw)
        if not claim.output:
            return {0: rw.call(self._op(""), *args, claimed_dtype(problem, claim))}
        assert fused.out_params is not None, "the claim covers the output"
        return {0: rw.call(self._op("_quantized"), *args, *output_args(fused.out_params, rw))}

    def _emit_rowwise(self, problem: LinearRowwiseProblem, rw: Rewriter) -> dict[int, Node]:
        fused, rows = problem.problem.fused, problem.rows
        steps = KernelSteps(problem.steps, fused.extras, problem.halved)
        args = self._arguments(problem.problem, steps, rw)
        if rows is None:
            return {0: rw.call(self._op(""), *args, float_out(fused))}
        if is_stored_at_once(problem):
            assert fused.out_params is not None, "its parameters are given"
            return {0: rw.call(self._op("_quantized"), *args, *output_args(fused.out_params, rw))}
        call = rw.call(self._op("_rows"), *args, rows.spec.float_dtype, *rowwise_output_args(rows))
        indices = [replaced.index for replaced in problem.replaced]
        return {index: rw.item(call, rows.kernel_result(index)) for index in indices}

    def _arguments(
        self, problem: LinearProblem, steps: KernelSteps, rw: Rewriter
    ) -> list[Argument]:
        """Return the leading arguments, which the three ops share."""
        fused, x = problem.fused, problem.fused.x_params
        assert x is not None, "accepted without activation params"
        return [
            fused.x,
            scale_node(x, rw),
            None if x.zero_point is None else stored_zero(x.zero_point, x.spec.dtype, rw),
            *self.weight_operands(problem, rw, halves=steps.halved),
            None if fused.bias is None else typed(fused.bias, torch.float32, rw),
            kernel_extras(steps, rw),
            steps.text,
            problem.float_dtype,
        ]

    def _op(self, kind: str) -> OpOverload:
        name = self.name.removeprefix("qfuse.") + kind
        op: OpOverload = getattr(torch.ops.qfuse, name).default
        return op

    def _work(self, problem: LinearProblem, *, output: bool) -> list[WorkRange]:
        out_bits = 8 if output else bit_width(float_out(problem.fused))
        bits = Bits(8, self.weight_bits, out_bits)
        depth = self.depth(problem)
        return [linear_work(problem.rows, depth, problem.n, bits, ComputeKind.INT8)]


def check_rowwise_output(problem: LinearRowwiseProblem) -> Refusal | None:
    """Refuse output quantization of rows that no kernel supports."""
    if problem.rows is None or is_stored_at_once(problem):
        return None
    return check_output(problem.rows)


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
