"""What the kernel rows share: checks of edges, and constants in the type that a kernel reads."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch.fx.node import Argument

from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.epilogue import Act, Add, Cast, Mul, Step
from qfuse.ir.ops.linear import FusedLinear
from qfuse.ir.ops.value_range import bounds_of
from qfuse.ir.ops.views import QuantParams, dtype_of, shape_of
from qfuse.ir.quant.element import ScaleFormat
from qfuse.ir.quant.spec import Block, Granularity, ZeroPointDomain, dtype_name, dtype_range
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import Size, same_size
from qfuse.kernels import KernelLibrary
from qfuse.lower.problems.linear import LinearProblem
from qfuse.rewrite.prelude import Node, Rewriter
from qfuse.targets.target import Target

_INT32 = torch.iinfo(torch.int32)

# What qfuse's own kernels take, see kernels/csrc/kernel_api.h.
BYTES = (torch.int8, torch.uint8)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MOST_STEPS = 8
MOST_EXTRAS = 4
# Types to dequantize in that integer kernels stand in for: see ``check_edge``.
COMPUTES = (torch.float32, torch.bfloat16)


def check_platform(library: KernelLibrary, target: Target) -> Refusal | None:
    """Refuse a target that qfuse's own kernels do not run on, or where they could not be built."""
    if target.device != "cpu":
        return Refusal(f"it is a CPU kernel, the target is {target.device}")
    return None if library.available else Refusal(library.reason)


def is_whole(block: Block, shape: Sequence[Size]) -> bool:
    """Whether one scale covers a tensor of ``shape``."""
    return all(map(_covers, block, shape))


def rows_share_scale(block: Block, shape: Sequence[Size]) -> bool:
    """Whether every row, an index of all axes but the last, has one scale of its own.

    Of an axis that always has one element it does not matter what its block says.
    """
    lead = zip(block[:-1], shape[:-1], strict=True)
    return _covers(block[-1], shape[-1]) and all(b == 1 or same_size(s, 1) for b, s in lead)


def _covers(block: int | None, size: Size) -> bool:
    """Whether an axis is one block. An axis without elements has no block unless it is whole."""
    return block is None or (isinstance(size, int) and 0 < size <= block)


def check_rows(problem: LinearProblem) -> Refusal | None:
    """Refuse an activation that has neither one scale nor one per row."""
    fused = problem.fused
    if fused.x_params is None:
        return Refusal("the activation is not quantized")
    spec, shape = fused.x_params.spec, shape_of(fused.x)
    if is_whole(spec.block, shape) or rows_share_scale(spec.block, shape):
        return None
    return Refusal(f"the activation is scaled in blocks of {spec.block_text()}")


def check_edge(
    params: QuantParams, name: str, computes: Collection[torch.dtype] = COMPUTES
) -> Refusal | None:
    """Refuse what no integer kernel computes: other arithmetic, real offsets.

    A source that dequantizes in bfloat16 rounds every number there, and a kernel does not: it is
    nearer to what both mean. In float16 what rounds may also overflow.
    """
    refusal = check_scales(params, name, computes)
    if refusal is not None:
        return refusal
    if params.spec.domain is ZeroPointDomain.FLOAT_OFFSET:
        return Refusal(f"the {name}'s zero point is a real offset")
    zero = params.zero_point
    if zero is not None and dtype_of(zero).is_floating_point:
        return Refusal(f"the {name}'s zero point is stored as {dtype_of(zero)}")
    return None


def check_scales(
    params: QuantParams, name: str, computes: Collection[torch.dtype] = COMPUTES
) -> Refusal | None:
    """Refuse scales in formats of their own or of two levels, and arithmetic in other types."""
    spec = params.spec
    if spec.scale_format is not ScaleFormat.FLOAT:
        return Refusal(f"the {name}'s scales are stored as {spec.scale_format}")
    if spec.outer is not None:
        return Refusal(f"the {name}'s scales have a second level")
    if spec.arithmetic.compute not in computes:
        compute = dtype_name(spec.arithmetic.compute)
        return Refusal(f"the {name} is dequantized in {compute}, kernels compute in float32")
    return None


def check_zero_point(params: QuantParams, name: str) -> Refusal | None:
    """Refuse a zero point that may be no stored number: integer sums are not exact with it.

    Quantization that chooses a zero point clamps it; a model that computes one by itself may not.
    """
    if params.zero_point is None:
        return None
    dtype, bounds = params.spec.dtype, bounds_of(params.zero_point)
    low, high = dtype_range(dtype)
    if bounds is not None and low <= bounds[0] and bounds[1] <= high:
        return None
    where = f"outside of [{low}, {high}], the range of {dtype_name(dtype)}"
    if constant_value(params.zero_point) is not None:
        return Refusal(f"the {name} has a zero point {where}")
    return Refusal(f"the {name}'s zero point may lie {where}: clamp it to that")


def check_bias(problem: LinearProblem) -> Refusal | None:
    """Refuse a bias that is not one float per output feature."""
    bias = problem.fused.bias
    if bias is None or tuple(shape_of(bias)) == (problem.n,):
        return None
    return Refusal(f"the bias has shape {tuple(shape_of(bias))}, expected ({problem.n},)")


def channel_granularity(problem: LinearProblem) -> Granularity | Refusal:
    """Return per-tensor or per-channel, or refuse a weight that is scaled along its inputs."""
    params = problem.fused.weight_params
    if params is None:
        return Refusal("the weight is not quantized")
    block, shape = params.spec.block, (problem.n, problem.k)
    if is_whole(block, shape):
        return Granularity.PER_TENSOR
    if rows_share_scale(block, shape):
        return Granularity.PER_CHANNEL
    return Refusal(f"the weight is scaled in blocks of {params.spec.block_text()}")


def scale_node(params: QuantParams, rw: Rewriter) -> Node:
    """Return the scale in float32, rounded as the source does if it computes in less."""
    return typed(typed(params.scale, params.spec.arithmetic.compute, rw), torch.float32, rw)


def scale_vector(params: QuantParams, dtype: torch.dtype, size: int, rw: Rewriter) -> Node:
    """Return a constant scale as a vector, rounded as the source does if it computes in less."""
    value = constant_of(params.scale)
    assert value is not None, f"not a constant: {params.scale.format_node()}"
    flat = value.detach().to(params.spec.arithmetic.compute).to(dtype).reshape(-1)
    return rw.constant(flat.expand(size).contiguous(), f"{params.scale.target}_vector")


def typed(node: Node, dtype: torch.dtype, rw: Rewriter) -> Node:
    """Return ``node`` in ``dtype``: a constant is converted now, anything else at run time."""
    if dtype_of(node) is dtype:
        return node
    value = constant_of(node)
    if value is not None:
        return rw.constant(value.to(dtype), f"{node.target}_{str(dtype).removeprefix('torch.')}")
    return rw.call(torch.ops.aten._to_copy.default, node, dtype=dtype)


def check_epilogue(problem: LinearProblem) -> Refusal | None:
    """Refuse what is beyond the limits of qfuse's own kernels."""
    fused = problem.fused
    if len(fused.epilogue.steps) > MOST_STEPS or len(fused.extras) > MOST_EXTRAS:
        return Refusal("the epilogue has too many steps")
    if not all(map(is_plain, fused.epilogue.steps)):
        return Refusal("the epilogue multiplies the halves of a row, or rounds on the way")
    return check_extras(problem)


def check_extras(problem: LinearProblem) -> Refusal | None:
    """Refuse operands of the epilogue that are no floats of at most 32 bits."""
    strange = [dtype_of(e) for e in problem.fused.extras if dtype_of(e) not in FLOATS]
    return Refusal(f"an operand of the epilogue is {dtype_name(strange[0])}") if strange else None


def is_plain(step: Step) -> bool:
    """Whether a step of an epilogue is one of those that kernels know."""
    return isinstance(step, (Act, Add, Cast)) or (isinstance(step, Mul) and step.rounded is None)


def rows_of(x: Node, k: int, rw: Rewriter) -> Node:
    """Return an activation as ``[rows, K]`` with its elements in order.

    Torch's own kernels ask for that: some raise on other strides, and oneDNN takes the stride 0 of
    rows that are expanded for another one.
    """
    flat = rw.call(torch.ops.aten.reshape.default, x, [-1, k])
    return rw.call(torch.ops.aten.contiguous.default, flat)


def fits_int32(zero: Node) -> bool:
    """Whether a zero point can be converted to what the kernels read."""
    bounds = None if dtype_of(zero).is_floating_point else bounds_of(zero)
    return bounds is not None and _INT32.min <= bounds[0] and bounds[1] <= _INT32.max


def float_out(fused: FusedLinear) -> torch.dtype:
    """Return the float type behind the epilogue, whether or not a quantize follows."""
    return dtype_of(fused.node) if fused.out_params is None else fused.out_params.spec.real


def bits_of(dtype: torch.dtype) -> int:
    """Return the bits of one stored element."""
    return dtype.itemsize * 8


def stored_zero(zero: Node, dtype: torch.dtype, rw: Rewriter) -> Node:
    """Return a zero point as the kernel reads it, which raises for what is no stored number.

    A zero point that was chosen from NaN is an arbitrary integer. Its scale is NaN, and so is the
    result of its row, but the rows of others must not be lost with it.
    """
    wide = typed(zero, torch.int32, rw)
    low, high = dtype_range(dtype)
    bounds = bounds_of(zero, look=False)
    inside = bounds is not None and low <= bounds[0] and bounds[1] <= high
    if inside or constant_value(zero) is not None:
        return wide
    return rw.call(torch.ops.aten.clamp.default, wide, low, high)


def check_activation(problem: LinearProblem) -> Refusal | None:
    """Refuse activations that are no bytes with a scale, or one per row."""
    params = problem.fused.x_params
    if params is None:
        return Refusal("the activation is not quantized")
    if params.spec.dtype not in BYTES:
        return Refusal(f"the activation is stored as {params.spec.dtype}")
    if problem.real not in FLOATS:
        return Refusal(f"the linear computes in {problem.real}")
    return (
        check_rows(problem)
        or check_edge(params, "activation")
        or check_zero_point(params, "activation")
    )


def takes_output(fused: FusedLinear) -> bool:
    """Whether the kernel quantizes its output; if not, ATen does behind it."""
    params = fused.out_params
    assert params is not None, "the output is quantized"
    spec = params.spec
    return (
        spec.dtype in BYTES
        and check_edge(params, "output") is None
        and is_whole(spec.block, shape_of(fused.node))
        and spec.arithmetic.compute is torch.float32
        and spec.domain is not ZeroPointDomain.FLOAT_OFFSET
        and constant_of(params.scale) is not None
        and (params.zero_point is None or fits_int32(params.zero_point))
    )


def output_args(params: QuantParams, rw: Rewriter) -> list[Argument]:
    """Return how a result is quantized, in the order of the schemas."""
    spec = params.spec
    zero = None if params.zero_point is None else typed(params.zero_point, torch.int32, rw)
    math = spec.arithmetic
    return [
        params.scale,
        zero,
        spec.quant_min,
        spec.quant_max,
        math.reciprocal,
        math.zero_point_first,
        spec.dtype,
    ]
