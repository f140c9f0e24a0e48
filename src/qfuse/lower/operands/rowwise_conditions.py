"""Conditions of the kernels that load each row once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qfuse.ir.dtypes import BYTES, FLOATS
from qfuse.ir.ops.norm_spec import NormSpec
from qfuse.ir.ops.norms import LayerNorm, RmsNorm
from qfuse.ir.ops.value_range import fits_int32
from qfuse.ir.ops.views import QuantParams, dtype_of, shape_of
from qfuse.ir.quant.block import is_whole, rows_share_scale
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.ir.quant.spec import ZeroPointDomain, dtype_name
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import same_shape, same_size
from qfuse.lower.operands.checks import check_scales
from qfuse.lower.problems.conditions import Condition, Conditions, on
from qfuse.lower.problems.rowwise import RowwiseProblem
from qfuse.rewrite.prelude import Node

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


@dataclass(frozen=True, slots=True)
class RowSource:
    """An operand that is read row by row.

    Attributes:
        x: Its values.
        params: Their parameters; ``None`` if they are floats.
    """

    x: Node
    params: QuantParams | None


def input_conditions(problem: RowwiseProblem) -> Conditions:
    """Return the conditions on the input: floats, or bytes scaled per row or per tensor."""
    return _INPUT[problem.op.x_params is not None]


def residual_conditions(op: RmsNorm | LayerNorm) -> Conditions:
    """Return the conditions on a residual: those on the input, and its shape."""
    return () if op.residual is None else _RESIDUAL[op.residual_params is not None]


def output_conditions(problem: RowwiseProblem) -> Conditions:
    """Return the conditions on a result: 8 bits, quantized per row or per tensor."""
    return (*_OUTPUT, *(GIVEN if problem.output.choose is None else _CHOSEN))


def _source_conditions(what: str, *, quantized: bool) -> tuple[Condition[RowSource], ...]:
    """Return the conditions on an operand that is called ``what``."""
    if not quantized:
        return (Condition(f"the {what} is a float", lambda one: _check_float(one.x, what)),)
    return (
        Condition(f"the {what} has 8 bits", lambda one: _check_bytes(one.x, what)),
        Condition(f"kernels know the {what}'s scales", lambda one: _check_scales(one, what)),
        Condition(f"kernels know the {what}'s dtypes", lambda one: _check_dtypes(one, what)),
        Condition(
            f"the {what} has one scale, or one per row", lambda one: _check_blocks(one, what)
        ),
    )


def _check_float(x: Node, what: str) -> Refusal | None:
    if dtype_of(x) in FLOATS:
        return None
    return Refusal(f"the {what} is {dtype_name(dtype_of(x))}")


def _check_bytes(x: Node, what: str) -> Refusal | None:
    if dtype_of(x) in BYTES:
        return None
    return Refusal(f"the {what} is stored as {dtype_name(dtype_of(x))}")


def _params_of(source: RowSource) -> QuantParams:
    assert source.params is not None, "it is quantized"
    return source.params


def _check_scales(source: RowSource, what: str) -> Refusal | None:
    params = _params_of(source)
    refusal = check_scales(params, what, (torch.float32,))
    if refusal is None and params.spec.domain is ZeroPointDomain.FLOAT_OFFSET:
        return Refusal(f"the {what}'s zero point is a float offset")
    return refusal


def _check_dtypes(source: RowSource, what: str) -> Refusal | None:
    params = _params_of(source)
    if params.spec.float_dtype not in FLOATS or dtype_of(params.scale) not in _SCALES:
        return Refusal(f"the {what} or its scale has an unsupported float dtype")
    return None


def _check_blocks(source: RowSource, what: str) -> Refusal | None:
    spec, shape = _params_of(source).spec, shape_of(source.x)
    if is_whole(spec.block, shape) or rows_share_scale(spec.block, shape):
        return None
    return Refusal(f"the {what} is scaled in blocks of {spec.block_text()}")


def _input_of(problem: RowwiseProblem) -> RowSource:
    return RowSource(problem.op.x, problem.op.x_params)


def _residual_of(problem: RowwiseProblem) -> RowSource:
    op = problem.op
    assert isinstance(op, (RmsNorm, LayerNorm)), "only norms have one"
    assert op.residual is not None, "it has one"
    return RowSource(op.residual, op.residual_params)


def _check_residual_shape(problem: RowwiseProblem) -> Refusal | None:
    if not same_shape(shape_of(_residual_of(problem).x), shape_of(problem.op.x)):
        return Refusal("the residual is broadcast to the input, or the input to it")
    return None


_SHAPE = Condition("the residual has the shape of the input", _check_residual_shape)

_INPUT = {
    quantized: on(_input_of, _source_conditions("input", quantized=quantized))
    for quantized in (False, True)
}
_RESIDUAL = {
    quantized: (*on(_residual_of, _source_conditions("residual", quantized=quantized)), _SHAPE)
    for quantized in (False, True)
}


def check_axes(norm: NormSpec) -> Refusal | None:
    """Refuse other axes than the last."""
    return Refusal(f"it is over {norm.axes} axes") if norm.axes != 1 else None


def check_types(norm: NormSpec) -> Refusal | None:
    """Refuse computation in another dtype than float32."""
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


def _check_row_major(problem: RowwiseProblem) -> Refusal | None:
    # The kernels write rows one after the other, and the captured strides of results must stay.
    return None if problem.is_row_major else Refusal("its results are not row-major")


def _check_result(problem: RowwiseProblem) -> Refusal | None:
    stored = problem.spec.dtype
    return None if stored in BYTES else Refusal(f"its result is stored as {dtype_name(stored)}")


def _check_domain(problem: RowwiseProblem) -> Refusal | None:
    if problem.spec.domain is ZeroPointDomain.FLOAT_OFFSET:
        return Refusal("its zero point is a float offset")
    return None


def _check_plain(problem: RowwiseProblem) -> Refusal | None:
    if problem.spec.is_plain:
        return None
    return Refusal("its scale has a special format, or two levels")


def _check_result_types(problem: RowwiseProblem) -> Refusal | None:
    spec = problem.spec
    for dtype in (spec.float_dtype, spec.arithmetic.compute):
        if dtype not in FLOATS:
            return Refusal(
                f"it is quantized from {dtype_name(spec.float_dtype)} in {dtype_name(dtype)}"
            )
    return None


_OUTPUT: tuple[Condition[RowwiseProblem], ...] = (
    Condition("its results are row-major", _check_row_major),
    Condition("its result has 8 bits", _check_result),
    Condition("the zero point of its result is an integer", _check_domain),
    Condition("the scale of its result is a plain one", _check_plain),
    Condition("it is quantized in a float dtype of at most 32 bits", _check_result_types),
)


def _given(problem: RowwiseProblem) -> QuantParams:
    params = problem.output.params
    assert params is not None, "a quantized output has static or dynamic parameters"
    return params


def _check_whole(problem: RowwiseProblem) -> Refusal | None:
    spec = _given(problem).spec
    if is_whole(spec.block, problem.shape):
        return None
    return Refusal(f"its result is scaled in blocks of {spec.block_text()}")


def _check_given_scale(problem: RowwiseProblem) -> Refusal | None:
    dtype = dtype_of(_given(problem).scale)
    return None if dtype in _SCALES else Refusal(f"its scale is {dtype_name(dtype)}")


def _check_given_zero_point(problem: RowwiseProblem) -> Refusal | None:
    zero = _given(problem).zero_point
    if zero is None or fits_int32(zero):
        return None
    return Refusal("its zero point may not fit 32 bits")


GIVEN: tuple[Condition[RowwiseProblem], ...] = (
    Condition("its result has one scale", _check_whole),
    Condition("kernels read the dtype of the scale", _check_given_scale),
    Condition("the zero point fits 32 bits", _check_given_zero_point),
)
"""The conditions on static parameters."""


def _choose(problem: RowwiseProblem) -> ChooseSpec:
    choose = problem.output.choose
    assert choose is not None, "its parameters are chosen"
    return choose


def _check_per_row(problem: RowwiseProblem) -> Refusal | None:
    choose, spec = _choose(problem), problem.spec
    # The kernels find the extremes of a row while it
    # is in the cache, and no larger or smaller block.
    if rows_share_scale(choose.block, problem.shape) and choose.block == spec.block:
        return None
    return Refusal(f"its scale is computed for blocks of {spec.block_text()}, not per row")


def _check_formula(problem: RowwiseProblem) -> Refusal | None:
    formula = _choose(problem).formula
    return None if formula in ROWWISE_FORMULAS else Refusal(f"its scale is computed as {formula}")


def _check_range(problem: RowwiseProblem) -> Refusal | None:
    choose, spec = _choose(problem), problem.spec
    # The kernels have one range: a scale chosen for
    # [-127, 127] and used with [-128, 127] needs two.
    span = choose.dtype, choose.quant_min, choose.quant_max
    if span != (spec.dtype, spec.quant_min, spec.quant_max):
        return Refusal("its parameters are computed for another range than that of its result")
    return None


def _check_chosen_types(problem: RowwiseProblem) -> Refusal | None:
    choose = _choose(problem)
    if choose.scale_dtype not in _SCALES or choose.zero_point_dtype not in _ZEROS:
        return Refusal("its scale or zero point has an unsupported dtype")
    return None


_CHOSEN: tuple[Condition[RowwiseProblem], ...] = (
    Condition("its scale is computed per row", _check_per_row),
    Condition("kernels know the formula of its scale", _check_formula),
    Condition("its scale is computed for the range of its result", _check_range),
    Condition("kernels write the dtypes of its scale and zero point", _check_chosen_types),
)
