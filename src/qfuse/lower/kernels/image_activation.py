"""qfuse's own kernel: epilogue ops on channels-last images with a fused quantize."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.cost import WorkRange, without_calls
from qfuse.cost.sizes import at_points
from qfuse.cost.work import ComputeKind, Work
from qfuse.ir.dtypes import BYTES, FLOATS, bit_width
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.memory_formats import CHANNELS, has_fastest_channels
from qfuse.ir.ops.activation import Activation
from qfuse.ir.ops.epilogue import Add, Mul, Prelu
from qfuse.ir.ops.views import dtype_of, shape_of, tensor_of
from qfuse.ir.quant.block import covers, is_whole
from qfuse.ir.quant.spec import dtype_name
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import is_row_major, same_shape
from qfuse.lower.operands.checks import check_qparams, output_args, typed
from qfuse.lower.operands.images import channels_last_parts
from qfuse.lower.operands.rowwise import RowwiseKernel, check_given
from qfuse.lower.problems.claim import Claim
from qfuse.lower.problems.epilogue_text import KernelEpilogue
from qfuse.lower.problems.rowwise import RowwiseProblem
from qfuse.lower.problems.span import ACTIVATION, Span
from qfuse.rewrite.prelude import Node, Rewriter

# What a core computes in float32 while it converts a value to float and back: about a cycle of
# compiled loops, and a quarter of one in the kernel.
_LOOP_FLOPS, _KERNEL_FLOPS = 32.0, 8.0


@dataclass(frozen=True, slots=True)
class ImageActivationQuantized(RowwiseKernel):
    """``qfuse::image_activation_quantized``, which also joins the images that a cat joins."""

    covers: ClassVar[tuple[Span, ...]] = (ACTIVATION,)

    name: str = "qfuse.image_activation_quantized"

    def accepts(self, problem: RowwiseProblem) -> Claim | Refusal:
        """Accept float32 and 8-bit images that are quantized with known parameters."""
        op = problem.op
        assert isinstance(op, Activation), "it covers no other op"
        refusal = (
            _check_layout(op) or _check_source(op) or _check_operands(op) or _check_output(problem)
        )
        if refusal is not None:
            return refusal
        steps = KernelEpilogue.of_activation(op)
        if isinstance(steps, Refusal):
            return steps
        if steps.halved:
            return Refusal("it multiplies halves of an image")
        loops = [without_calls(_work(problem, _LOOP_FLOPS))]
        return Claim(0, True, [_work(problem, _KERNEL_FLOPS)], loops=loops)

    def emit(self, problem: RowwiseProblem, claim: Claim, rw: Rewriter) -> dict[int, Node]:
        """Emit the call; a cat that nothing else uses is left without users."""
        del claim
        op, params = problem.op, problem.output.params
        assert isinstance(op, Activation), "it was accepted"
        assert params is not None, "it was accepted"
        steps = KernelEpilogue.of_activation(op)
        assert isinstance(steps, KernelEpilogue), "it was accepted"
        joined = channels_last_parts(op.x) if len(op.x.users) == 1 else None
        first, *others = joined or (op.x,)
        scale = zero = None
        if op.x_params is not None:
            scale = typed(op.x_params.scale, torch.float32, rw)
            if op.x_params.zero_point is not None:
                zero = typed(op.x_params.zero_point, torch.float32, rw)
        call = rw.call(
            self.op(),
            first,
            others or None,
            scale,
            zero,
            list(steps.extras) or None,
            steps.text,
            *output_args(params, rw),
        )
        return {0: call}


def _work(problem: RowwiseProblem, flops: float) -> WorkRange:
    """Return the work of one pass over all operands, with so many operations per value."""
    read = [bit_width(dtype_of(node)) for node in (problem.op.x, *problem.operands)]
    written = bit_width(problem.spec.dtype)

    def build(count: int) -> Work:
        return Work(
            flops=flops * count,
            kind=ComputeKind.F32,
            reads=tuple(count * bits / 8 for bits in read),
            writes=(count * written / 8,),
        )

    return at_points(build, problem.elements)


def _check_layout(op: Activation) -> Refusal | None:
    """Refuse what is not channels-last."""
    result, x = op.node.meta["val"][0], tensor_of(op.x)
    if not same_shape(result.shape, x.shape):
        return Refusal("its operands broadcast its input to another shape")
    if is_row_major(result) or not has_fastest_channels(result):
        return Refusal("its result is not a channels-last image")
    return None if has_fastest_channels(x) else Refusal("its input is not channels-last")


def _check_source(op: Activation) -> Refusal | None:
    """Refuse images that are neither float32 nor 8-bit values scaled per tensor or per channel."""
    params, dtype = op.x_params, dtype_of(op.x)
    if params is None:
        return None if dtype is torch.float32 else Refusal(f"its input is {dtype_name(dtype)}")
    if dtype not in BYTES or params.spec.float_dtype is not torch.float32:
        real = dtype_name(params.spec.float_dtype)
        return Refusal(f"its input is stored as {dtype_name(dtype)} for {real}")
    refusal = check_qparams(params, "input", (torch.float32,))
    if refusal is not None:
        return refusal
    block, shape = params.spec.block, shape_of(op.x)
    others = [
        covers(b, size)
        for axis, (b, size) in enumerate(zip(block, shape, strict=True))
        if axis != CHANNELS
    ]
    if is_whole(block, shape) or (all(others) and block[CHANNELS] == 1):
        return None
    return Refusal(f"its input is scaled in blocks of {params.spec.block_text()}")


def _check_operands(op: Activation) -> Refusal | None:
    """Refuse operands that are neither floats nor quantized to 8 bits, and those without axes.

    A 0-d tensor does not take part in type promotion, which the kernel does not know.
    """
    for step in op.epilogue.ops:
        if not isinstance(step, (Add, Mul, Prelu)):
            continue
        extra = op.extras[step.index]
        is_stored = not isinstance(step, Prelu) and step.stored is not None
        if dtype_of(extra) not in (BYTES if is_stored else FLOATS):
            return Refusal(f"an operand is {dtype_name(dtype_of(extra))}")
        if not shape_of(extra):
            return Refusal("an operand has no axis")
    return None


def _check_output(problem: RowwiseProblem) -> Refusal | None:
    """Refuse results that are not 8-bit values of one known scale, and float results besides."""
    params, spec = problem.output.params, problem.spec
    if params is None:
        return Refusal("its parameters are computed at run time")
    if problem.output.keep:
        return Refusal("its float result has other users")
    if spec.dtype not in BYTES or spec.float_dtype is not torch.float32:
        names = dtype_name(spec.float_dtype), dtype_name(spec.dtype)
        return Refusal("it is quantized from {} to {}".format(*names))
    if constant_of(params.scale) is None:
        return Refusal("its scale is computed at run time")
    return check_qparams(params, "output", (torch.float32,)) or check_given(problem)
