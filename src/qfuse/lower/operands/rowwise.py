"""Shared code of qfuse's rowwise kernels: norms and activations with a fused quantize."""

from __future__ import annotations

import torch
from torch.fx.node import Argument

from qfuse.ir.dtypes import BYTES, FLOATS
from qfuse.ir.ops.norm_spec import NormSpec
from qfuse.ir.ops.norms import LayerNorm, RmsNorm
from qfuse.ir.ops.output import ExtraOutput
from qfuse.ir.ops.value_range import fits_int32
from qfuse.ir.ops.views import QuantParams, dtype_of, shape_of
from qfuse.ir.quant.block import is_whole, rows_share_scale
from qfuse.ir.quant.choose import Formula
from qfuse.ir.quant.spec import ZeroPointDomain, dtype_name
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import same_shape, same_size
from qfuse.lower.operands.checks import check_scales, typed
from qfuse.lower.operands.own_kernel import OwnKernel
from qfuse.lower.problems.rowwise import RowwiseProblem
from qfuse.rewrite.prelude import Node, Rewriter
from qfuse.targets.target import Target

ROWWISE_FORMULAS = (
    Formula.AO_SYMMETRIC,
    Formula.AO_SYMMETRIC_NO_CLIPPING,
    Formula.AO_ASYMMETRIC,
    Formula.DECOMPOSED_AFFINE,
    Formula.DECOMPOSED_SYMMETRIC,
    Formula.TOKEN_SYMMETRIC,
    Formula.TOKEN_ASYMMETRIC,
)
"""The formulas of dynamic scales in the kernels, see kernels/csrc/rowwise/choose.h."""

_SCALES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_ZEROS = (*_SCALES, torch.int64, torch.int32, torch.int8, torch.uint8)


class RowwiseKernel(OwnKernel):
    """A kernel that loads each row once."""

    __slots__ = ()

    def supported(self, target: Target) -> Refusal | None:
        """Refuse if the kernels could not be built, or would run without vector instructions."""
        refusal = OwnKernel.supported(self, target)
        if refusal is not None:
            return refusal
        if self.library.instruction_sets[-1] == "portable":
            return Refusal("the processor has no supported vector instructions")
        return None


def check_residual(op: RmsNorm | LayerNorm) -> Refusal | None:
    """Refuse a residual that the kernels do not read, or of another shape than the input."""
    if op.residual is None:
        return None
    refusal = check_source(op.residual, op.residual_params, "residual")
    if refusal is not None:
        return refusal
    if not same_shape(shape_of(op.residual), shape_of(op.x)):
        return Refusal("the residual is broadcast to the input, or the input to it")
    return None


def check_source(x: Node, params: QuantParams | None, what: str) -> Refusal | None:
    """Refuse operands that are neither floats nor bytes scaled per row or per tensor."""
    dtype = dtype_of(x)
    if params is None:
        return None if dtype in FLOATS else Refusal(f"the {what} is {dtype_name(dtype)}")
    spec, shape = params.spec, shape_of(x)
    if dtype not in BYTES:
        return Refusal(f"the {what} is stored as {dtype_name(dtype)}")
    refusal = check_scales(params, what, (torch.float32,))
    if refusal is None and spec.domain is ZeroPointDomain.FLOAT_OFFSET:
        refusal = Refusal(f"the {what}'s zero point is a float offset")
    if refusal is not None:
        return refusal
    if spec.float_dtype not in FLOATS or dtype_of(params.scale) not in _SCALES:
        return Refusal(f"the {what} or its scale has an unsupported float dtype")
    if is_whole(spec.block, shape) or rows_share_scale(spec.block, shape):
        return None
    return Refusal(f"the {what} is scaled in blocks of {spec.block_text()}")


def source_args(x: Node | None, params: QuantParams | None, rw: Rewriter) -> list[Argument]:
    """Return the arguments of an operand: values, scale, zero point, float dtype."""
    if x is None:
        # Without an operand its dtype has no meaning.
        return [None, None, None, torch.float32]
    if params is None:
        return [x, None, None, dtype_of(x)]
    # Ahead of time, not in every call.
    scale = typed(params.scale, torch.float32, rw)
    zero = params.zero_point
    return [
        x,
        scale,
        None if zero is None else typed(zero, torch.float32, rw),
        params.spec.float_dtype,
    ]


def check_types(norm: NormSpec) -> Refusal | None:
    """Refuse computation in another dtype than float32, and other axes than the last."""
    if norm.axes != 1:
        return Refusal(f"it is over {norm.axes} axes")
    for dtype in (norm.compute, norm.product):
        if dtype is not torch.float32:
            return Refusal(f"it computes in {dtype_name(dtype)}")
    return None


def check_vectors(problem: RowwiseProblem, *vectors: Node | None) -> Refusal | None:
    """Refuse weights and biases that do not have one float per column."""
    for vector in vectors:
        if vector is None:
            continue
        if dtype_of(vector) not in FLOATS:
            return Refusal(f"its weight or bias is {dtype_name(dtype_of(vector))}")
        # A scalar fits no row.
        *lead, last = shape_of(vector) or (0,)
        if not same_size(last, problem.shape[-1]) or any(not same_size(s, 1) for s in lead):
            return Refusal("its weight or bias does not have one element per column")
    return None


def float_vector(node: Node | None, rw: Rewriter) -> Node | None:
    """Return a vector in the kernel's dtype; constants are converted ahead of time."""
    return None if node is None else typed(node, torch.float32, rw)


def check_output(problem: RowwiseProblem) -> Refusal | None:
    """Refuse results that are not 8-bit, or quantized neither per row nor per tensor."""
    # The kernels write rows one after the other, and the captured strides of results must stay.
    if not problem.is_row_major:
        return Refusal("its results are not row-major")
    spec = problem.spec
    if spec.dtype not in BYTES:
        return Refusal(f"its result is stored as {dtype_name(spec.dtype)}")
    if spec.domain is ZeroPointDomain.FLOAT_OFFSET:
        return Refusal("its zero point is a float offset")
    if not spec.is_plain:
        return Refusal("its scale has a special format, or two levels")
    for dtype in (spec.float_dtype, spec.arithmetic.compute):
        if dtype not in FLOATS:
            return Refusal(
                f"it is quantized from {dtype_name(spec.float_dtype)} in {dtype_name(dtype)}"
            )
    return check_given(problem) if problem.output.choose is None else _check_chosen(problem)


def check_given(problem: RowwiseProblem) -> Refusal | None:
    """Refuse static parameters of blocks, and of dtypes that kernels do not read."""
    params = problem.output.params
    assert params is not None, "a quantized output has static or dynamic parameters"
    if not is_whole(params.spec.block, problem.shape):
        return Refusal(f"its result is scaled in blocks of {params.spec.block_text()}")
    if dtype_of(params.scale) not in _SCALES:
        return Refusal(f"its scale is {dtype_name(dtype_of(params.scale))}")
    if params.zero_point is not None and not fits_int32(params.zero_point):
        return Refusal("its zero point may not fit 32 bits")
    return None


def _check_chosen(problem: RowwiseProblem) -> Refusal | None:
    choose, spec = problem.output.choose, problem.spec
    assert choose is not None, "its parameters are chosen"
    # The kernels find the extremes of a row while it
    # is in the cache, and no larger or smaller block.
    if not rows_share_scale(choose.block, problem.shape) or choose.block != spec.block:
        return Refusal(f"its scale is computed for blocks of {spec.block_text()}, not per row")
    if choose.formula not in ROWWISE_FORMULAS:
        return Refusal(f"its scale is computed as {choose.formula}")
    # The kernels have one range: a scale chosen for
    # [-127, 127] and used with [-128, 127] needs two.
    span = choose.dtype, choose.quant_min, choose.quant_max
    if span != (spec.dtype, spec.quant_min, spec.quant_max):
        return Refusal("its parameters are computed for another range than that of its result")
    if choose.scale_dtype not in _SCALES or choose.zero_point_dtype not in _ZEROS:
        return Refusal("its scale or zero point has an unsupported dtype")
    return None


def rowwise_output_args(problem: RowwiseProblem) -> list[Argument]:
    """Return the output quantization arguments of a rowwise kernel."""
    spec, choose, params = problem.spec, problem.output.choose, problem.output.params
    math = spec.arithmetic
    given: list[Argument] = [None, None] if params is None else [params.scale, params.zero_point]
    # Static parameters: the empty formula tells the kernel to choose nothing.
    chosen: list[Argument] = ["", 0.0, torch.float32, torch.int32]
    if choose is not None:
        chosen = [str(choose.formula), choose.eps, choose.scale_dtype, choose.zero_point_dtype]
    keep = problem.output.keep
    return [
        *given,
        *chosen,
        spec.quant_min,
        spec.quant_max,
        spec.dtype,
        math.compute,
        math.reciprocal,
        math.zero_point_first,
        ExtraOutput.FLOAT in keep,
        ExtraOutput.SUM in keep,
    ]
