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
from qfuse.ir.ops.views import QuantParams, dtype_of, shape_of, tensor_of
from qfuse.ir.quant.block import covers, is_whole
from qfuse.ir.quant.spec import dtype_name
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import is_row_major, same_shape
from qfuse.lower.operands.checks import output_args, typed
from qfuse.lower.operands.images import channels_last_parts
from qfuse.lower.operands.product_conditions import scale_conditions
from qfuse.lower.operands.rowwise import RowwiseKernel
from qfuse.lower.operands.rowwise_conditions import GIVEN
from qfuse.lower.problems.claim import Claim
from qfuse.lower.problems.conditions import Condition, Conditions, hold, on
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

    def conditions(self, problem: RowwiseProblem) -> Conditions:
        """Return those on the layout, the input, the operands, the result and the ops."""
        source = _FLOAT if problem.op.x_params is None else _QUANTIZED
        return (*_LAYOUT, *source, _OPERANDS, *_OUTPUT, *GIVEN, _STEPS)

    def accepts(self, problem: RowwiseProblem) -> Claim | Refusal:
        """Accept float32 and 8-bit images that are quantized with known parameters."""
        refusal = hold(self.conditions(problem), problem)
        if refusal is not None:
            return refusal
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


def _activation(problem: RowwiseProblem) -> Activation:
    assert isinstance(problem.op, Activation), "it covers no other op"
    return problem.op


def _check_shape(problem: RowwiseProblem) -> Refusal | None:
    if same_shape(problem.op.node.meta["val"][0].shape, tensor_of(problem.op.x).shape):
        return None
    return Refusal("its operands broadcast its input to another shape")


def _check_result(problem: RowwiseProblem) -> Refusal | None:
    result = problem.op.node.meta["val"][0]
    if is_row_major(result) or not has_fastest_channels(result):
        return Refusal("its result is not a channels-last image")
    return None


def _check_image(problem: RowwiseProblem) -> Refusal | None:
    if has_fastest_channels(tensor_of(problem.op.x)):
        return None
    return Refusal("its input is not channels-last")


_LAYOUT: tuple[Condition[RowwiseProblem], ...] = (
    Condition("its result has the shape of its input", _check_shape),
    Condition("its result is a channels-last image", _check_result),
    Condition("its input is channels-last", _check_image),
)


def _check_float(problem: RowwiseProblem) -> Refusal | None:
    dtype = dtype_of(problem.op.x)
    return None if dtype is torch.float32 else Refusal(f"its input is {dtype_name(dtype)}")


def _x_params(problem: RowwiseProblem) -> QuantParams:
    assert problem.op.x_params is not None, "it is quantized"
    return problem.op.x_params


def _check_stored(problem: RowwiseProblem) -> Refusal | None:
    dtype, real = dtype_of(problem.op.x), _x_params(problem).spec.float_dtype
    if dtype not in BYTES or real is not torch.float32:
        return Refusal(f"its input is stored as {dtype_name(dtype)} for {dtype_name(real)}")
    return None


def _check_blocks(problem: RowwiseProblem) -> Refusal | None:
    block, shape = _x_params(problem).spec.block, shape_of(problem.op.x)
    others = [
        covers(b, size)
        for axis, (b, size) in enumerate(zip(block, shape, strict=True))
        if axis != CHANNELS
    ]
    if is_whole(block, shape) or (all(others) and block[CHANNELS] == 1):
        return None
    return Refusal(f"its input is scaled in blocks of {_x_params(problem).spec.block_text()}")


_FLOAT: tuple[Condition[RowwiseProblem], ...] = (Condition("its input is float32", _check_float),)

_QUANTIZED: tuple[Condition[RowwiseProblem], ...] = (
    Condition("its input has 8 bits and is dequantized to float32", _check_stored),
    *on(_x_params, scale_conditions("input", (torch.float32,))),
    Condition("its input has one scale, or one per channel", _check_blocks),
)


def _check_operands(problem: RowwiseProblem) -> Refusal | None:
    """Refuse operands that are neither floats nor quantized to 8 bits, and those without axes.

    A 0-d tensor does not take part in type promotion, which the kernel does not know.
    """
    op = _activation(problem)
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


_OPERANDS = Condition("kernels read its operands", _check_operands)


def _given(problem: RowwiseProblem) -> QuantParams:
    params = problem.output.params
    assert params is not None, "checked before"
    return params


def _check_known(problem: RowwiseProblem) -> Refusal | None:
    if problem.output.params is None:
        return Refusal("its parameters are computed at run time")
    return None


def _check_kept(problem: RowwiseProblem) -> Refusal | None:
    return Refusal("its float result has other users") if problem.output.keep else None


def _check_types(problem: RowwiseProblem) -> Refusal | None:
    spec = problem.spec
    if spec.dtype not in BYTES or spec.float_dtype is not torch.float32:
        names = dtype_name(spec.float_dtype), dtype_name(spec.dtype)
        return Refusal("it is quantized from {} to {}".format(*names))
    return None


def _check_constant(problem: RowwiseProblem) -> Refusal | None:
    if constant_of(_given(problem).scale) is None:
        return Refusal("its scale is computed at run time")
    return None


_OUTPUT: tuple[Condition[RowwiseProblem], ...] = (
    Condition("its parameters are static", _check_known),
    Condition("only its quantized result is used", _check_kept),
    Condition("it is quantized from float32 to 8 bits", _check_types),
    Condition("its scale is a constant", _check_constant),
    *on(_given, scale_conditions("output", (torch.float32,))),
)


def _check_steps(problem: RowwiseProblem) -> Refusal | None:
    steps = KernelEpilogue.of_activation(_activation(problem))
    if isinstance(steps, Refusal):
        return steps
    return Refusal("it multiplies halves of an image") if steps.halved else None


_STEPS = Condition("kernels of images know its epilogue ops", _check_steps)
