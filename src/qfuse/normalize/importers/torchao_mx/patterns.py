"""The ATen ops of torchao's ``to_mx`` and ``get_fp_scale`` in a traced graph."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from qfuse.ir.ops.views import shape_of
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.ir.quant.element import ScaleFormat
from qfuse.ir.quant.spec import Arithmetic, Block, QuantSpec, ZeroPointDomain, dtype_range
from qfuse.ir.sizes import same_shape
from qfuse.normalize.match.views import view_source
from qfuse.rewrite.pattern import ANY, Capture, Either, Maybe, Pattern, V, bind, cast, let, op
from qfuse.rewrite.prelude import Miss, MissCode, Node, aten

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_REALS = (torch.float32, torch.bfloat16)
_FIELD = 23
_BIAS = 127
_NAN = 255
_INFINITE = 254


@dataclass(frozen=True, slots=True)
class MxBlocks:
    """A tensor that is quantized in blocks along its last axis.

    Attributes:
        node: The tensor, viewed such that its last axis is a block.
        x: The tensor before that view, or ``node``.
        block: The block of ``x``.
        rounding: How the exponents of its scales are rounded.
        stored: Dtype of the quantized values.
    """

    node: Node
    x: Node
    block: Block
    rounding: Formula
    stored: torch.dtype


BLOCKS: Capture[MxBlocks] = Capture("mx_blocks")
SCALE = V("scale")
_X = V("blocks", _REALS)
_ROUNDING: Capture[Formula] = Capture("rounding")
_STORED: Capture[torch.dtype] = Capture("stored")


def choose_spec(blocks: MxBlocks) -> ChooseSpec:
    """Return the spec with which block scales are chosen."""
    codes = dtype_range(blocks.stored)
    dtype = torch.float8_e8m0fnu
    return ChooseSpec(blocks.rounding, blocks.stored, *codes, blocks.block, 0.0, dtype)


def mx_spec(
    stored: torch.dtype, block: Block, float_dtype: torch.dtype, *, reciprocal: bool = True
) -> QuantSpec:
    """Return the spec of quantized values in blocks with scales that are powers of two."""
    return QuantSpec(
        stored,
        *dtype_range(stored),
        block,
        float_dtype,
        Arithmetic(reciprocal=reciprocal),
        ZeroPointDomain.NONE,
        scale_format=ScaleFormat.E8M0,
    )


def exponents() -> Pattern:
    """Return the pattern of the biased exponents of block scales, as uint8: ``BLOCKS``."""
    return Either(*(_kind(codes, how, dtype) for how, dtype, codes in _kinds()))


def scaled_blocks() -> Pattern:
    """Return the pattern of values scaled by ``BLOCKS``, before they are cast to ``float8``."""
    kinds = _kinds()
    return Either(*(_kind(_scaled(how, dtype, codes), how, dtype) for how, dtype, codes in kinds))


def power_of_scale() -> Pattern:
    """Return the pattern of the float32 form of ``SCALE``, which is ``float8_e8m0fnu``."""
    codes = op(aten.view.dtype, SCALE.giving(torch.float8_e8m0fnu), torch.uint8)
    exponent = cast(codes, torch.int16) - _BIAS
    two = op(aten.full_like.default, exponent, 2.0, dtype=torch.float32, pin_memory=ANY)
    power = op(aten.pow.Tensor_Tensor, two, exponent)
    known = op(aten.ne.Scalar, codes, _NAN)
    return op(aten.where.ScalarOther, known, power, math.nan)


def _kind(pattern: Pattern, rounding: Formula, stored: torch.dtype) -> Pattern:
    kind = bind(_ROUNDING, rounding), bind(_STORED, stored)
    return pattern.given(*kind, let(BLOCKS, _read_blocks))


def _read_blocks(blocks: Node, rounding: Formula, stored: torch.dtype) -> MxBlocks | Miss:
    shape = shape_of(blocks)
    if len(shape) < 2 or not isinstance(shape[-1], int):  # noqa: PLR2004
        return Miss(MissCode.PATTERN, blocks, "a tensor of shape {} has no blocks", tuple(shape))
    source, size = view_source(blocks), shape[-1]
    # The view that splits the last axis into blocks becomes part of the spec.
    if source is not None and len(shape_of(source)) == len(shape) - 1:
        joined = (*shape[:-2], shape[-2] * size)
        if same_shape(shape_of(source), joined):
            lead = (1,) * (len(shape) - 2)
            return MxBlocks(blocks, source, (*lead, size), rounding, stored)
    return MxBlocks(blocks, blocks, (*(1,) * (len(shape) - 1), None), rounding, stored)


def _kinds() -> list[tuple[Formula, torch.dtype, Pattern]]:
    found: list[tuple[Formula, torch.dtype, Pattern]] = []
    for stored in _FLOAT8:
        top = torch.finfo(stored).max
        found.append((Formula.MX_RCEIL, stored, _rceil_codes(top)))
        # The scale maps the exponent of a block's maximum to that of the largest element: 8 for
        # 448.
        exponent = math.frexp(top)[1] - 1
        powers = Formula.MX_FLOOR, Formula.MX_CEIL
        found += [(each, stored, _exponent_codes(each, exponent)) for each in powers]
    return found


def _wide(value: Pattern) -> Pattern:
    return Maybe(cast(value, torch.float32), value.giving(torch.float32))


def _peak() -> Pattern:
    peak = op(aten.amax.default, op(aten.abs.default, _X), [-1])
    return _wide(op(aten.unsqueeze.default, peak, -1))


def _rceil_codes(top: float) -> Pattern:
    ratio = _peak() / top
    rounded = op(aten.ceil.default, op(aten.log2.default, ratio))
    finite = cast(op(aten.clamp.default, rounded, -_BIAS, _BIAS) + _BIAS, torch.uint8)
    codes = _where(op(aten.isinf.default, ratio), _INFINITE, finite)
    return _where(op(aten.isnan.default, ratio), _NAN, codes)


def _exponent_codes(rounding: Formula, of_top: int) -> Pattern:
    # The exponent bits of float32 are read and rounded as integers.
    bits = op(aten.view.dtype, _peak(), torch.int32)
    shifted = op(aten.bitwise_right_shift.Tensor_Scalar, bits, _FIELD)
    exponent = op(aten.__and__.Scalar, shifted, _NAN) - _BIAS
    if rounding is Formula.MX_CEIL:
        mantissa = op(aten.__and__.Scalar, bits, (1 << _FIELD) - 1)
        exponent = exponent + op(aten.gt.Scalar, mantissa, 0)
    clamped = op(aten.clamp.default, exponent - of_top, -_BIAS, _BIAS + 1)
    return _where(op(aten.isnan.default, _peak()), _NAN, cast(clamped + _BIAS, torch.uint8))


def _scaled(rounding: Formula, stored: torch.dtype, codes: Pattern) -> Pattern:
    """Return the pattern of scaled values; values out of range are clamped, or saturate."""
    top = torch.finfo(stored).max
    # The scales are matched first: every product has another operand.
    if rounding is Formula.MX_RCEIL:
        scaled = _reciprocal(codes, top).core() * _wide(_X)
    else:
        scaled = op(aten.div.Tensor, other=_divisor(codes).core(), self=_wide(_X))
    clamped = op(aten.clamp.default, scaled, -top, top)
    # torch's cast to e5m2 turns values out of range into infinities.
    return Maybe(clamped, scaled) if stored is torch.float8_e4m3fn else clamped


def _reciprocal(codes: Pattern, top: float) -> Pattern:
    exponent = op(aten.rsub.Scalar, cast(codes, torch.float32), _BIAS)
    power = _where(_equals(codes, 0), 1.0, op(aten.exp2.default, exponent))
    power = _where(_equals(codes, _INFINITE), 2.0**-_BIAS, power)
    return op(aten.where.self, _equals(codes, _NAN), _peak() / top, power)


def _divisor(codes: Pattern) -> Pattern:
    bits = op(aten.bitwise_left_shift.Tensor_Scalar, cast(codes, torch.int32), _FIELD)
    power = op(aten.view.dtype, bits, torch.float32)
    # The code 0 shifted into the exponent is the float 0, which must not be a divisor.
    return op(aten.clamp.default, power, torch.finfo(torch.float32).tiny)


def _where(condition: Pattern, value: float, other: Pattern) -> Pattern:
    return op(aten.where.ScalarSelf, condition, value, other)


def _equals(codes: Pattern, value: int) -> Pattern:
    return op(aten.eq.Scalar, codes, value)
