"""How dynamic quantization chooses scale and zero point: data, canonical text, reference."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache

import torch

from qfuse.ir.errors import NormalizeError
from qfuse.ir.quant.block import block_grid, block_text, parse_block
from qfuse.ir.quant.element import Element
from qfuse.ir.quant.element import greatest as greatest_of
from qfuse.ir.quant.mx_scale import block_scale, power_scale, tensor_scale
from qfuse.ir.quant.reference import peaks, reduce_blocks
from qfuse.ir.quant.spec import Block, dtype_name, parse_dtype, parse_stored, stored_name


class Formula(StrEnum):
    """The formula that computes scale and zero point from a block's minimum and maximum.

    The ``AO`` formulas are torchao's ``choose_qparams_affine``, and its ``choose_scale_float8``,
    which lacks a minimum scale and a zero point; the ``DECOMPOSED`` ones are
    ``quantized_decomposed.choose_qparams*``; they differ in eps, dtypes and rounding.

    The ``MX`` formulas return a power of two and are named by how its exponent is rounded, as in
    torchao's ``to_mx``. ``NVFP4`` returns a scale in ``float8_e4m3fn``, relative to a second level
    of scales if there is one; ``NVFP4_OUTER`` computes that level. They follow torchao's
    ``nvfp4_quantize`` and ``per_tensor_amax_to_scale``.
    """

    AO_SYMMETRIC = "ao-symmetric"
    AO_SYMMETRIC_NO_CLIPPING = "ao-symmetric-no-clipping"
    AO_ASYMMETRIC = "ao-asymmetric"
    AO_FLOAT8 = "ao-float8"
    DECOMPOSED_AFFINE = "decomposed-affine"
    DECOMPOSED_SYMMETRIC = "decomposed-symmetric"
    TOKEN_SYMMETRIC = "token-symmetric"
    TOKEN_ASYMMETRIC = "token-asymmetric"
    MX_FLOOR = "mx-floor"
    MX_CEIL = "mx-ceil"
    MX_EVEN = "mx-even"
    MX_RCEIL = "mx-rceil"
    NVFP4 = "nvfp4"
    NVFP4_OUTER = "nvfp4-outer"


_POWERS = (Formula.MX_FLOOR, Formula.MX_CEIL, Formula.MX_EVEN, Formula.MX_RCEIL)
_MICRO = (*_POWERS, Formula.NVFP4, Formula.NVFP4_OUTER)


@dataclass(frozen=True, slots=True)
class ChooseSpec:
    """What ``qfuse::choose_qparams`` computes.

    Attributes:
        formula: Source of the formula.
        dtype: Storage dtype that the parameters are for.
        quant_min: Smallest quantized value.
        quant_max: Largest quantized value.
        block: Elements that share one scale, per axis; ``None`` is the whole axis.
        eps: Minimum scale.
        scale_dtype: Dtype of the returned scale.
        zero_point_dtype: Dtype of the returned zero point.
        element: The number format within the storage dtype.
        outer: Whether the scale is relative to a second, per-tensor scale, which is an input.
    """

    formula: Formula
    dtype: torch.dtype
    quant_min: int
    quant_max: int
    block: Block
    eps: float
    scale_dtype: torch.dtype = torch.float32
    zero_point_dtype: torch.dtype = torch.int32
    element: Element = Element.WHOLE
    outer: bool = False

    def __post_init__(self) -> None:
        if self.outer and self.formula is not Formula.NVFP4:
            raise NormalizeError(f"{self.formula} takes no second scale", fix="leave it out")

    def __str__(self) -> str:
        stored = stored_name(self.dtype, self.element)
        return (
            f"{self.formula} {stored}[{self.quant_min},{self.quant_max}] "
            f"{block_text(self.block)} eps={self.eps!r} "
            f"{dtype_name(self.scale_dtype)} {dtype_name(self.zero_point_dtype)}"
            f"{' outer' if self.outer else ''}"
        )

    @classmethod
    def parse(cls, text: str) -> ChooseSpec:
        """Parse the canonical text.

        Raises:
            NormalizeError: The text is not a choose spec.
        """
        return _parse(text)

    def widened(self) -> ChooseSpec:
        """Return the spec that computes in float64."""
        # The formula computes in the dtype of `x`, which is float64 already.
        return replace(self, scale_dtype=torch.float64)

    def grid(self, shape: Sequence[int | torch.SymInt]) -> tuple[int | torch.SymInt, ...]:
        """Return the shape of scale and zero point for a tensor of ``shape``."""
        return block_grid(self.block, shape)


_TEXT = re.compile(
    rf"(?P<formula>{'|'.join(Formula)}) (?P<dtype>\w+)\[(?P<low>-?\d+),(?P<high>-?\d+)\] "
    r"(?P<block>\S+) eps=(?P<eps>\d+(\.\d+)?(e[+-]?\d+)?) (?P<scale>\w+) (?P<zero>\w+)"
    r"(?P<outer> outer)?"
)


@cache
def _parse(text: str) -> ChooseSpec:
    found = _TEXT.fullmatch(text)
    if found is None:
        raise NormalizeError(f"not the text of a choose spec: {text!r}")
    dtype, element = parse_stored(found["dtype"])
    return ChooseSpec(
        Formula(found["formula"]),
        dtype,
        int(found["low"]),
        int(found["high"]),
        parse_block(found["block"]),
        float(found["eps"]),
        parse_dtype(found["scale"]),
        parse_dtype(found["zero"]),
        element,
        found["outer"] is not None,
    )


def fixed_zero_point(spec: ChooseSpec) -> int | None:
    """Return the zero point that a formula always chooses, ``None`` if it depends on the data."""
    match spec.formula:
        case Formula.AO_SYMMETRIC | Formula.AO_SYMMETRIC_NO_CLIPPING:
            # The middle of the range: 0 for [-128, 127], 128 for [0, 255].
            return int((spec.quant_max + spec.quant_min + 1) / 2)
        case Formula.DECOMPOSED_SYMMETRIC:
            return 128 if spec.dtype is torch.uint8 else 0
        case Formula.AO_ASYMMETRIC | Formula.DECOMPOSED_AFFINE | Formula.TOKEN_ASYMMETRIC:
            return None
        case _:
            return 0


def choose_qparams(
    x: torch.Tensor, spec: ChooseSpec, outer_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose scale and zero point for every block of ``x``.

    Args:
        x: Float tensor; the formula is computed in its dtype, as the sources do.
        spec: The formula and the storage dtype.
        outer_scale: The per-tensor scale, in the rank of ``x``, if the spec takes one.

    Returns:
        Scale and zero point, both of shape ``spec.grid(x.shape)``.
    """
    count: int | torch.SymInt = x.numel()
    # A symbolic count is not compared, since that would add a guard.
    if isinstance(count, int) and count == 0:
        return _empty(x, spec)
    if spec.formula in _MICRO:
        scale = _micro(peaks(x, spec.block).float(), spec, outer_scale)
        return scale, torch.zeros_like(scale, dtype=spec.zero_point_dtype)
    least, greatest = reduce_blocks(x, spec.block)
    match spec.formula:
        case Formula.TOKEN_SYMMETRIC:
            scale, zero = _token_symmetric(least, greatest, spec)
        case Formula.TOKEN_ASYMMETRIC:
            scale, zero = _token_asymmetric(least, greatest, spec)
        case Formula.AO_SYMMETRIC | Formula.DECOMPOSED_SYMMETRIC:
            scale, zero = _symmetric(least, greatest, spec)
        case Formula.AO_SYMMETRIC_NO_CLIPPING:
            scale, zero = _symmetric_no_clipping(least, greatest, spec)
        case Formula.AO_FLOAT8:
            scale = torch.maximum(least.abs(), greatest.abs()) / float(spec.quant_max)
            zero = torch.zeros_like(scale)
        case _:
            scale, zero = _affine(least, greatest, spec)
    return scale.to(spec.scale_dtype), zero.to(spec.zero_point_dtype)


def _micro(peak: torch.Tensor, spec: ChooseSpec, outer_scale: torch.Tensor | None) -> torch.Tensor:
    """Return the scale of blocks with maximum magnitude ``peak``, which may be NaN."""
    if spec.formula in _POWERS:
        rounding = spec.formula.removeprefix("mx-")
        return power_scale(peak, rounding, spec.dtype, spec.element)
    top = greatest_of(spec.dtype, spec.element)
    if spec.formula is Formula.NVFP4_OUTER:
        return tensor_scale(peak, top)
    return block_scale(peak, top, spec.eps, outer_scale)


def _empty(x: torch.Tensor, spec: ChooseSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return neutral parameters, which are never used since ``x`` is empty."""
    grid = spec.grid(x.shape)
    scale = x.new_ones(grid, dtype=spec.scale_dtype)
    return scale, x.new_zeros(grid, dtype=spec.zero_point_dtype)


def _clamp_scale(scale: torch.Tensor, spec: ChooseSpec) -> torch.Tensor:
    """Keep the scale at ``eps`` or above.

    The decomposed ops take the maximum with a float32 tensor, which promotes a bf16 scale to
    float32; torchao clamps with a number, which does not.
    """
    if spec.formula in {Formula.DECOMPOSED_AFFINE, Formula.DECOMPOSED_SYMMETRIC}:
        # Same rank as the scale, because torch promotes 0-d tensors by other rules.
        # Made from the scale, so that tracing sees a tensor of the scale's own kind.
        eps = scale.new_full((1,) * scale.ndim, spec.eps, dtype=torch.float32)
        return torch.max(scale, eps)
    return torch.clamp(scale, min=spec.eps)


def _split(least: torch.Tensor, greatest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Extend the interval to contain zero."""
    return torch.min(least, torch.zeros_like(least)), torch.max(
        greatest, torch.zeros_like(greatest)
    )


def _symmetric(
    least: torch.Tensor, greatest: torch.Tensor, spec: ChooseSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = _split(least, greatest)
    # Half the width of the range, as in torchao: 127.5 for int8, so that -128 is used too.
    scale = torch.max(-low, high) / (float(spec.quant_max - spec.quant_min) / 2)
    if spec.formula is Formula.DECOMPOSED_SYMMETRIC:
        zero = 128 if spec.dtype is torch.uint8 else 0
    else:
        zero = int((spec.quant_max + spec.quant_min + 1) / 2)
    return _clamp_scale(scale, spec), torch.full_like(scale, zero)


def _symmetric_no_clipping(
    least: torch.Tensor, greatest: torch.Tensor, spec: ChooseSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = _split(least, greatest)
    # Each end is divided by its own bound, so that neither is clipped.
    below, above = low / float(spec.quant_min), high / float(spec.quant_max)
    scale = torch.where(below > above, below, above)
    zero = torch.full_like(scale, int((spec.quant_max + spec.quant_min + 1) / 2))
    return _clamp_scale(scale, spec), zero


def _affine(
    least: torch.Tensor, greatest: torch.Tensor, spec: ChooseSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = _split(least, greatest)
    scale = _clamp_scale((high - low) / float(spec.quant_max - spec.quant_min), spec)
    ratio = torch.round(low / scale)
    if spec.formula is Formula.DECOMPOSED_AFFINE:
        # The source subtracts in int32.
        ratio = ratio.to(torch.int32)
    return scale, torch.clamp(spec.quant_min - ratio, spec.quant_min, spec.quant_max)


def _token_symmetric(
    least: torch.Tensor, greatest: torch.Tensor, spec: ChooseSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = torch.maximum(least.abs(), greatest.abs())
    # As the source does, which computes bfloat16 in its own dtype.
    if scale.dtype is torch.float16:
        scale = scale.float()
    scale = scale.clamp(min=spec.eps).div(spec.quant_max)
    return scale, torch.zeros_like(scale)


def _token_asymmetric(
    least: torch.Tensor, greatest: torch.Tensor, spec: ChooseSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = _split(least, greatest)
    qmin, qmax = spec.quant_min, spec.quant_max
    scale = ((high - low) / float(qmax - qmin)).clamp(min=spec.eps)
    below, above = low / scale, high / scale
    # XNNPACK's choice: the end with the smaller rounding error anchors the zero point.
    zero = torch.where((qmin + below) + (qmax + above) > 0, qmin - below, qmax - above)
    return scale, torch.clamp(zero, qmin, qmax).round()
