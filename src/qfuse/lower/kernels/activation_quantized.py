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
    check_output,
    check_source,
    rowwise_output_args,
    source_args,
)
from qfuse.lower.problems.claim import Claim
from qfuse.lower.problems.epilogue_limits import MOST_EPILOGUE_OPERANDS, MOST_EPILOGUE_OPS
from qfuse.lower.problems.rowwise import RowwiseProblem
from qfuse.lower.problems.span import ACTIVATION, Span
from qfuse.rewrite.prelude import Node, Rewriter


@dataclass(frozen=True, slots=True)
class ActivationQuantized(RowwiseKernel):
    """``qfuse::activation_quantized``."""

    covers: ClassVar[tuple[Span, ...]] = (ACTIVATION,)

    name: str = "qfuse.activation_quantized"

    def accepts(self, problem: RowwiseProblem) -> Claim | Refusal:
        """Accept the epilogue ops that the linear kernels accept."""
        op = problem.op
        assert isinstance(op, Activation), "it covers no other op"
        refusal = (
            _check_steps(op) or check_output(problem) or check_source(op.x, op.x_params, "input")
        )
        return refusal or problem.claim(statistics=0)

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


def _check_steps(op: Activation) -> Refusal | None:
    """Refuse quantized inputs, unsupported epilogue ops, and broadcast operands."""
    steps, glu = _steps(op), _glu(op)
    # The other half would be an operand with parameters of its own.
    if glu is not None and op.x_params is not None:
        return Refusal("both halves of its input are quantized")
    # The up half becomes operand 0, which would renumber other operands.
    halved = glu is None or (not op.extras and isinstance(shape_of(op.x)[-1], int))
    if not all(map(is_covered, steps)) or not halved:
        return Refusal(f"it does not support all of {op.epilogue}")
    # The kernel has arrays of fixed size for both.
    if len(steps) > MOST_EPILOGUE_OPS or len(op.extras) > MOST_EPILOGUE_OPERANDS:
        return Refusal("it has too many epilogue ops")
    for extra in op.extras:
        if dtype_of(extra) not in FLOATS:
            return Refusal(f"an operand is {dtype_name(dtype_of(extra))}")
        if not same_shape(shape_of(extra), shape_of(op.x)):
            return Refusal("an operand is broadcast to the input, or the input to it")
    return None
