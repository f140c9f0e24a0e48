"""qfuse's own kernel: an activation with a fused quantize."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx.node import Argument

from qfuse.ir.dtypes import FLOATS
from qfuse.ir.ops.activation import Activation
from qfuse.ir.ops.epilogue import Epilogue, EpilogueOp, Glu, GluOrder, Mul
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.quant.spec import dtype_name
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import same_shape
from qfuse.lower.operands.epilogue import is_covered
from qfuse.lower.operands.rowwise import (
    RowwiseKernel,
    rowwise_output_args,
    source_args,
)
from qfuse.lower.operands.rowwise_conditions import (
    input_conditions,
    output_conditions,
)
from qfuse.lower.problems.claim import Claim
from qfuse.lower.problems.conditions import Condition, Conditions, hold
from qfuse.lower.problems.epilogue_limits import MOST_EPILOGUE_OPERANDS, MOST_EPILOGUE_OPS
from qfuse.lower.problems.rowwise import RowwiseProblem
from qfuse.lower.problems.span import ACTIVATION, Span
from qfuse.rewrite.prelude import Node, Rewriter


@dataclass(frozen=True, slots=True)
class ActivationQuantized(RowwiseKernel):
    """``qfuse::activation_quantized``."""

    covers: ClassVar[tuple[Span, ...]] = (ACTIVATION,)

    name: str = "qfuse.activation_quantized"

    def conditions(self, problem: RowwiseProblem) -> Conditions:
        """Return those on the epilogue ops, the result and the input."""
        return (*_STEPS, *output_conditions(problem), *input_conditions(problem))

    def accepts(self, problem: RowwiseProblem) -> Claim | Refusal:
        """Accept the epilogue ops that the linear kernels accept."""
        return hold(self.conditions(problem), problem) or problem.claim(statistics=0)

    def emit(self, problem: RowwiseProblem, claim: Claim, rw: Rewriter) -> dict[int, Node]:
        """Emit the call."""
        del claim
        op = problem.op
        assert isinstance(op, Activation), "it was accepted"
        x, extras, glu = op.x, list(op.extras), _glu(op)
        if glu is not None:
            x, up = _halves(op.x, glu, rw)
            extras = [up]
        steps = str(Epilogue(_steps(op)))
        args: list[Argument] = [
            *source_args(x, op.x_params, rw),
            extras or None,
            steps,
            problem.spec.float_dtype,
        ]
        call = rw.call(
            torch.ops.qfuse.activation_quantized.default, *args, *rowwise_output_args(problem)
        )
        return problem.results(call, rw)


def _glu(op: Activation) -> Glu | None:
    """Return the GLU if it is the first epilogue op."""
    first = next(iter(op.epilogue.ops), None)
    return first if isinstance(first, Glu) else None


def _steps(op: Activation) -> tuple[EpilogueOp, ...]:
    """Return the epilogue on the gate half, with the other GLU half as the first operand."""
    glu, steps = _glu(op), op.epilogue.ops
    # The op language has the halves in one operand, the kernel has two operands of one shape.
    return steps if glu is None else (glu.act, Mul(0), *steps[1:])


def _halves(x: Node, glu: Glu, rw: Rewriter) -> tuple[Node, Node]:
    """Return the gate and the up half as slices, whose rows are strided."""
    *_, size = shape_of(x)
    assert isinstance(size, int), "only an axis of known size is halved"
    cut = torch.ops.aten.slice.Tensor
    low, high = rw.call(cut, x, -1, 0, size // 2), rw.call(cut, x, -1, size // 2, size)
    return (low, high) if glu.order is GluOrder.GATE_FIRST else (high, low)


def _activation(problem: RowwiseProblem) -> Activation:
    assert isinstance(problem.op, Activation), "it covers no other op"
    return problem.op


def _check_halves(problem: RowwiseProblem) -> Refusal | None:
    op = _activation(problem)
    # The other half would be an operand with parameters of its own.
    if _glu(op) is not None and op.x_params is not None:
        return Refusal("both halves of its input are quantized")
    return None


def _check_known(problem: RowwiseProblem) -> Refusal | None:
    op = _activation(problem)
    # The up half becomes operand 0, which would renumber other operands.
    halved = _glu(op) is None or (not op.extras and isinstance(shape_of(op.x)[-1], int))
    if all(map(is_covered, _steps(op))) and halved:
        return None
    return Refusal(f"it does not support all of {op.epilogue}")


def _check_count(problem: RowwiseProblem) -> Refusal | None:
    op = _activation(problem)
    # The kernel has arrays of fixed size for both.
    if len(_steps(op)) > MOST_EPILOGUE_OPS or len(op.extras) > MOST_EPILOGUE_OPERANDS:
        return Refusal("it has too many epilogue ops")
    return None


def _check_operands(problem: RowwiseProblem) -> Refusal | None:
    op = _activation(problem)
    for extra in op.extras:
        if dtype_of(extra) not in FLOATS:
            return Refusal(f"an operand is {dtype_name(dtype_of(extra))}")
        if not same_shape(shape_of(extra), shape_of(op.x)):
            return Refusal("an operand is broadcast to the input, or the input to it")
    return None


_STEPS: tuple[Condition[RowwiseProblem], ...] = (
    Condition("it multiplies no quantized halves", _check_halves),
    Condition("kernels know its epilogue ops", _check_known),
    Condition("it has few epilogue ops", _check_count),
    Condition("its operands are floats of the shape of its input", _check_operands),
)
