"""Operand checks that kernels share, and constants in the dtypes that kernels expect."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx.node import Argument

from qfuse.ir.dtypes import BYTES, FLOATS
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.product import FusedProduct
from qfuse.ir.ops.value_range import bounds_of, fits_int32
from qfuse.ir.ops.views import QuantParams, dtype_of, shape_of
from qfuse.ir.quant.block import is_per_input, is_whole, rows_share_scale
from qfuse.ir.quant.element import Element, ScaleFormat
from qfuse.ir.quant.spec import Granularity, QuantSpec, ZeroPointDomain, dtype_name, dtype_range
from qfuse.ir.refusal import Refusal
from qfuse.kernels import KernelLibrary
from qfuse.lower.operands.groups import PER_INPUT
from qfuse.lower.problems.linear import LinearProblem
from qfuse.lower.problems.product import ProductProblem, WeightedProblem
from qfuse.rewrite.prelude import Node, Rewriter
from qfuse.targets.target import Target

# Dequantization dtypes that integer kernels may replace: see ``check_qparams``.
COMPUTES = (torch.float32, torch.bfloat16)


def check_platform(library: KernelLibrary, target: Target) -> Refusal | None:
    """Refuse targets that qfuse's own kernels do not support, or where they could not be built."""
    if target.device != "cpu":
        return Refusal(f"it is a CPU kernel, the target is {target.device}")
    return None if library.available else Refusal(library.reason)


def check_rows(problem: LinearProblem) -> Refusal | None:
    """Refuse an activation that is quantized neither per tensor nor per row."""
    fused = problem.fused
    if fused.x_params is None:
        return Refusal("the activation is not quantized")
    spec, shape = fused.x_params.spec, shape_of(fused.x)
    if is_whole(spec.block, shape) or rows_share_scale(spec.block, shape):
        return None
    return Refusal(f"the activation is scaled in blocks of {spec.block_text()}")


def check_qparams(
    params: QuantParams, name: str, computes: Collection[torch.dtype] = COMPUTES
) -> Refusal | None:
    """Refuse other arithmetic and float zero points, which no integer kernel supports.

    A source that dequantizes in bfloat16 rounds every value; a kernel does not, which is closer to
    the exact result. float16 is refused, since there the source may also overflow.
    """
    return check_scales(params, name, computes) or check_integer_zero_point(params, name)


def check_integer_zero_point(params: QuantParams, name: str) -> Refusal | None:
    """Refuse zero points that are floats."""
    if params.spec.domain is ZeroPointDomain.FLOAT_OFFSET:
        return Refusal(f"the {name}'s zero point is a float offset")
    zero = params.zero_point
    # A zero point of 0.5 has no integer form, and the sums are integers.
    if zero is not None and dtype_of(zero).is_floating_point:
        return Refusal(f"the {name}'s zero point is stored as {dtype_of(zero)}")
    return None


def check_scales(
    params: QuantParams, name: str, computes: Collection[torch.dtype] = COMPUTES
) -> Refusal | None:
    """Refuse other scale formats, two-level scales, and arithmetic in other dtypes."""
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
    """Refuse a zero point outside the dtype's range: integer sums would not be exact.

    ``choose_qparams`` clamps zero points; a model that computes its own may not.
    """
    if params.zero_point is None:
        return None
    dtype, bounds = params.spec.dtype, bounds_of(params.zero_point)
    low, high = dtype_range(dtype)
    # Kernels hold it in the dtype of the values: 300 would wrap to 44 in uint8.
    if bounds is not None and low <= bounds[0] and bounds[1] <= high:
        return None
    where = f"outside [{low}, {high}], the range of {dtype_name(dtype)}"
    if constant_value(params.zero_point) is not None:
        return Refusal(f"the {name} has a zero point {where}")
    return Refusal(f"the {name}'s zero point may be {where}: clamp it")


def check_bias(problem: WeightedProblem) -> Refusal | None:
    """Refuse a bias that does not have one element per output feature."""
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
    if is_per_input(block):
        return Refusal(PER_INPUT)
    return Refusal(f"the weight is scaled in blocks of {params.spec.block_text()}")


def scale_node(params: QuantParams, rw: Rewriter) -> Node:
    """Return the scale in float32, after rounding it to the source's compute dtype."""
    return typed(typed(params.scale, params.spec.arithmetic.compute, rw), torch.float32, rw)


def scale_vector(params: QuantParams, dtype: torch.dtype, size: int, rw: Rewriter) -> Node:
    """Return a constant scale as a vector, after rounding it to the source's compute dtype."""
    value = constant_of(params.scale)
    assert value is not None, f"not a constant: {params.scale.format_node()}"
    flat = value.detach().to(params.spec.arithmetic.compute).to(dtype).reshape(-1)
    return rw.constant(flat.expand(size).contiguous(), f"{params.scale.target}_vector")


def typed(node: Node, dtype: torch.dtype, rw: Rewriter) -> Node:
    """Return ``node`` in ``dtype``; constants are converted ahead of time."""
    if dtype_of(node) is dtype:
        return node
    value = constant_of(node)
    if value is not None:
        return rw.constant(value.to(dtype), f"{node.target}_{str(dtype).removeprefix('torch.')}")
    return rw.call(torch.ops.aten._to_copy.default, node, dtype=dtype)


def check_stored_weight(params: QuantParams, floats: Collection[torch.dtype]) -> Refusal | None:
    """Refuse weights of other floats than ``floats``, and zero points of floats."""
    spec = params.spec
    if spec.dtype.is_floating_point:
        if spec.dtype not in floats or spec.element is not Element.WHOLE:
            return Refusal(f"the weight is stored as {stored_name_of(spec)}")
        if params.zero_point is not None:
            return Refusal(f"the weight is stored as {spec.dtype} and has a zero point")
    return None


def check_constant_weight(weight: Node, params: QuantParams) -> Refusal | None:
    """Refuse weights or parameters that are not constants."""
    if any(constant_of(part) is None for part in (weight, *params.tensors)):
        return Refusal("the weight or its parameters are computed at run time")
    return None


def stored_name_of(spec: QuantSpec) -> str:
    """Return how quantized values are stored, such as ``torch.int8`` or ``float4_e2m1``."""
    return str(spec.dtype) if spec.element is Element.WHOLE else spec.element.value


def float_bias(problem: WeightedProblem, rw: Rewriter) -> Node | None:
    """Return the bias in the dtype of qfuse's kernels."""
    bias = problem.fused.bias
    return None if bias is None else typed(bias, torch.float32, rw)


def check_epilogue_operands(problem: ProductProblem) -> Refusal | None:
    """Refuse epilogue operands that are not floats of at most 32 bits."""
    strange = [dtype_of(e) for e in problem.fused.extras if dtype_of(e) not in FLOATS]
    return Refusal(f"an operand of the epilogue is {dtype_name(strange[0])}") if strange else None


def rows_of(x: Node, k: int, rw: Rewriter) -> Node:
    """Return an activation as a contiguous ``[rows, K]``.

    torch's own kernels need that: some raise on other strides, and oneDNN misreads the stride 0 of
    expanded rows.
    """
    flat = rw.call(torch.ops.aten.reshape.default, x, [-1, k])
    return rw.call(torch.ops.aten.contiguous.default, flat)


def float_out(fused: FusedProduct) -> torch.dtype:
    """Return the float dtype of the epilogue's result, before a quantize."""
    return dtype_of(fused.node) if fused.out_params is None else fused.out_params.spec.float_dtype


def stored_zero(zero: Node, dtype: torch.dtype, rw: Rewriter) -> Node:
    """Return a zero point clamped to the dtype's range, since kernels raise outside of it.

    A zero point that was computed from NaN is an arbitrary integer. Its scale is NaN, and so is
    its row of the result, but the other rows must stay valid.
    """
    wide = typed(zero, torch.int32, rw)
    low, high = dtype_range(dtype)
    bounds = bounds_of(zero, look=False)
    # By the dtype only: bounds from producing ops ignore NaN, which is the case to guard against. A
    # constant has been checked by `check_zero_point`.
    inside = bounds is not None and low <= bounds[0] and bounds[1] <= high
    if inside or constant_value(zero) is not None:
        return wide
    return rw.call(torch.ops.aten.clamp.default, wide, low, high)


def takes_output(fused: FusedProduct) -> bool:
    """Whether the kernel quantizes its output; otherwise ATen ops do it afterwards."""
    params = fused.out_params
    assert params is not None, "the output is quantized"
    spec = params.spec
    return (
        spec.dtype in BYTES
        and check_qparams(params, "output") is None
        and is_whole(spec.block, shape_of(fused.node))
        # `check_qparams` allows bfloat16, but quantizing in it rounds to other quantized values.
        and spec.arithmetic.compute is torch.float32
        and constant_of(params.scale) is not None
        and (params.zero_point is None or fits_int32(params.zero_point))
    )


def output_args(params: QuantParams, rw: Rewriter) -> list[Argument]:
    """Return the output quantization arguments, in the order of the schemas."""
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
