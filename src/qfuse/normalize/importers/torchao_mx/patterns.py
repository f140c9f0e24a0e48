"""How torchao's ``to_mx`` and ``get_fp_scale`` look when they were traced op by op."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch

from qfuse.ir.ops.views import dtype_of, node_of, shape_of
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.ir.quant.element import ScaleFormat
from qfuse.ir.quant.spec import Arithmetic, Block, QuantSpec, ZeroPointDomain, dtype_range
from qfuse.ir.sizes import same_shape
from qfuse.normalize.match.pattern import ANY, Call, Found, Maybe, Pattern, Var, find
from qfuse.normalize.match.views import view_source
from qfuse.rewrite.prelude import Node, aten

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_REALS = (torch.float32, torch.bfloat16)
_FIELD = 23
_BIAS = 127
_NAN = 255
_INFINITE = 254
_BLOCKS = Var("blocks")


@dataclass(frozen=True, slots=True)
class MxBlocks:
    """A tensor that is quantized in blocks along its last axis.

    Attributes:
        node: The tensor, viewed such that its last axis is a block.
        x: The tensor itself, or ``node``.
        block: The block of ``x``.
        rounding: How the exponents of its scales are rounded.
        stored: What it is stored as.
    """

    node: Node
    x: Node
    block: Block
    rounding: Formula
    stored: torch.dtype


def read_codes(value: object) -> MxBlocks | None:
    """Read what the biased exponents of block scales, as uint8, are chosen for."""
    for rounding, stored, pattern in _codes():
        found = find(pattern, value)
        if found is not None:
            return _blocks(found, rounding, stored)
    return None


def read_factor(value: object) -> MxBlocks | None:
    """Read stored numbers before they are cast to ``float8``: real ones, scaled by their blocks."""
    for rounding, stored, codes in _codes():
        found = find(_scaled(rounding, stored, codes), value)
        if found is not None:
            return _blocks(found, rounding, stored)
    return None


def read_scale(value: object) -> Node | None:
    """Return the scale, as ``float8_e8m0fnu``, of which ``value`` is the float32 form."""
    codes = Call(aten.view.dtype, {"self": Var("scale"), "dtype": torch.uint8})
    short = Call(aten._to_copy.default, {"self": codes, "dtype": torch.int16})
    exponent = Call(aten.sub.Tensor, {"self": short, "other": _BIAS})
    two = {"self": exponent, "fill_value": 2.0, "dtype": torch.float32, "pin_memory": ANY}
    power = {"self": Call(aten.full_like.default, two), "exponent": exponent}
    known = Call(aten.ne.Scalar, {"self": codes, "other": _NAN})
    where = {
        "condition": known,
        "self": Call(aten.pow.Tensor_Tensor, power),
        "other": math.nan,
    }
    found = find(Call(aten.where.ScalarOther, where), value)
    if found is None:
        return None
    scale = node_of(found["scale"])  # type: ignore[arg-type]
    return scale if dtype_of(scale) is torch.float8_e8m0fnu else None


def choose_spec(blocks: MxBlocks) -> ChooseSpec:
    """Return how the scales of blocks are chosen."""
    codes = dtype_range(blocks.stored)
    dtype = torch.float8_e8m0fnu
    return ChooseSpec(blocks.rounding, blocks.stored, *codes, blocks.block, 0.0, dtype)


def mx_spec(
    stored: torch.dtype, block: Block, real: torch.dtype, *, reciprocal: bool = True
) -> QuantSpec:
    """Return the spec of numbers in blocks with scales that are powers of two."""
    return QuantSpec(
        stored,
        *dtype_range(stored),
        block,
        real,
        Arithmetic(reciprocal=reciprocal),
        ZeroPointDomain.NONE,
        scale_format=ScaleFormat.E8M0,
    )


def _blocks(found: Found, rounding: Formula, stored: torch.dtype) -> MxBlocks | None:
    node = node_of(found["blocks"])  # type: ignore[arg-type]
    shape = shape_of(node)
    if len(shape) < 2 or not isinstance(shape[-1], int) or dtype_of(node) not in _REALS:  # noqa: PLR2004
        return None
    source, size = view_source(node), shape[-1]
    if source is not None and len(shape_of(source)) == len(shape) - 1:
        joined = (*shape[:-2], shape[-2] * size)
        if same_shape(shape_of(source), joined):
            lead = (1,) * (len(shape) - 2)
            return MxBlocks(node, source, (*lead, size), rounding, stored)
    return MxBlocks(node, node, (*(1,) * (len(shape) - 1), None), rounding, stored)


@cache
def _codes() -> tuple[tuple[Formula, torch.dtype, Call], ...]:
    return tuple(_all_codes())


def _all_codes() -> Iterator[tuple[Formula, torch.dtype, Call]]:
    for stored in _FLOAT8:
        top = torch.finfo(stored).max
        yield Formula.MX_RCEIL, stored, _rceil_codes(top)
        for rounding in (Formula.MX_FLOOR, Formula.MX_CEIL):
            yield rounding, stored, _exponent_codes(rounding, math.frexp(top)[1] - 1)


def _wide(value: Pattern) -> Maybe:
    cast = Call(aten._to_copy.default, {"self": value, "dtype": torch.float32})
    return Maybe(cast, torch.float32)


def _peak() -> Maybe:
    size = Call(aten.abs.default, {"self": _BLOCKS})
    peak = Call(aten.amax.default, {"self": size, "dim": [-1]})
    return _wide(Call(aten.unsqueeze.default, {"self": peak, "dim": -1}))


def _ratio(top: float) -> Call:
    return Call(aten.div.Tensor, {"self": _peak(), "other": top})


def _rceil_codes(top: float) -> Call:
    ratio = _ratio(top)
    rounded = Call(aten.ceil.default, {"self": Call(aten.log2.default, {"self": ratio})})
    clamped = Call(aten.clamp.default, {"self": rounded, "min": -_BIAS, "max": _BIAS})
    finite = _cast(_plus(clamped), torch.uint8)
    infinite = Call(aten.isinf.default, {"self": ratio})
    return _where(
        Call(aten.isnan.default, {"self": ratio}), _NAN, _where(infinite, _INFINITE, finite)
    )


def _exponent_codes(rounding: Formula, of_top: int) -> Call:
    bits = Call(aten.view.dtype, {"self": _peak(), "dtype": torch.int32})
    shifted = Call(aten.bitwise_right_shift.Tensor_Scalar, {"self": bits, "other": _FIELD})
    field = Call(aten.__and__.Scalar, {"self": shifted, "other": _NAN})
    exponent = Call(aten.sub.Tensor, {"self": field, "other": _BIAS})
    if rounding is Formula.MX_CEIL:
        mantissa = Call(aten.__and__.Scalar, {"self": bits, "other": (1 << _FIELD) - 1})
        more = Call(aten.gt.Scalar, {"self": mantissa, "other": 0})
        exponent = Call(aten.add.Tensor, {"self": exponent, "other": more})
    relative = Call(aten.sub.Tensor, {"self": exponent, "other": of_top})
    clamped = Call(aten.clamp.default, {"self": relative, "min": -_BIAS, "max": _BIAS + 1})
    return _where(
        Call(aten.isnan.default, {"self": _peak()}), _NAN, _cast(_plus(clamped), torch.uint8)
    )


def _scaled(rounding: Formula, stored: torch.dtype, codes: Call) -> Call | Maybe:
    """Return the pattern of scaled numbers; what is beyond the range is clamped, or saturates."""
    top = torch.finfo(stored).max
    if rounding is Formula.MX_RCEIL:
        scaled = Call(aten.mul.Tensor, {"self": _wide(_BLOCKS), "other": _reciprocal(codes, top)})
    else:
        scaled = Call(aten.div.Tensor, {"self": _wide(_BLOCKS), "other": _divisor(codes)})
    clamped = Call(aten.clamp.default, {"self": scaled, "min": -top, "max": top})
    # torch's cast to e5m2 makes infinities of what is beyond the range.
    return Maybe(clamped) if stored is torch.float8_e4m3fn else clamped


def _reciprocal(codes: Call, top: float) -> Call:
    exponent = {"self": _cast(codes, torch.float32), "other": _BIAS}
    power = Call(aten.exp2.default, {"self": Call(aten.rsub.Scalar, exponent)})
    power = _where(_equals(codes, 0), 1.0, power)
    power = _where(_equals(codes, _INFINITE), 2.0**-_BIAS, power)
    where = {"condition": _equals(codes, _NAN), "self": _ratio(top), "other": power}
    return Call(aten.where.self, where)


def _divisor(codes: Call) -> Call:
    shift = {"self": _cast(codes, torch.int32), "other": _FIELD}
    bits = Call(aten.bitwise_left_shift.Tensor_Scalar, shift)
    power = Call(aten.view.dtype, {"self": bits, "dtype": torch.float32})
    return Call(aten.clamp.default, {"self": power, "min": torch.finfo(torch.float32).tiny})


def _plus(value: Pattern) -> Call:
    return Call(aten.add.Tensor, {"self": value, "other": _BIAS})


def _cast(value: Pattern, dtype: torch.dtype) -> Call:
    return Call(aten._to_copy.default, {"self": value, "dtype": dtype})


def _where(condition: Pattern, value: float, other: Pattern) -> Call:
    return Call(aten.where.ScalarSelf, {"condition": condition, "self": value, "other": other})


def _equals(codes: Call, value: int) -> Call:
    return Call(aten.eq.Scalar, {"self": codes, "other": value})
