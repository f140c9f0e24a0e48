"""The ops of the simulator, and what each means. In real life these come from another package."""

from __future__ import annotations

import torch
import torch.nn.functional as F

EPS = 1e-6
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MXFP4_CODES = (*MXFP4_VALUES, *(-value for value in MXFP4_VALUES))


@torch.library.custom_op("simulator::quantize", mutates_args=())
def quantize(
    x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, bits: int
) -> torch.Tensor:
    """Quantize to ``bits`` bits in int8: ``clamp(round(x / scale) + zero_point)``, one scale."""
    half = 2 ** (bits - 1)
    return ((x / scale).round() + zero_point).clamp(-half, half - 1).to(torch.int8)


@quantize.register_fake
def _(x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, bits: int) -> torch.Tensor:
    del scale, zero_point, bits
    return torch.empty_like(x, dtype=torch.int8)


@torch.library.custom_op("simulator::dynamic_quantize_symmetric", mutates_args=())
def dynamic_quantize_symmetric(
    x: torch.Tensor, dims: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to int8 with one scale for all that ``dims`` span: ``max |x| / 127.5``."""
    scale = (x.abs().amax(dims, keepdim=True) / 127.5).clamp(min=EPS)
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


@dynamic_quantize_symmetric.register_fake
def _(x: torch.Tensor, dims: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x, dtype=torch.int8), x.amax(dims, keepdim=True)


@torch.library.custom_op("simulator::dynamic_quantize_asymmetric", mutates_args=())
def dynamic_quantize_asymmetric(
    x: torch.Tensor, dims: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize to int8 with one scale and zero point for all that ``dims`` span."""
    low = x.amin(dims, keepdim=True).clamp(max=0)
    high = x.amax(dims, keepdim=True).clamp(min=0)
    scale = ((high - low) / 255).clamp(min=EPS)
    zero = (-128 - (low / scale).round()).clamp(-128, 127)
    codes = ((x / scale).round() + zero).clamp(-128, 127).to(torch.int8)
    return codes, scale, zero.to(torch.int8)


@dynamic_quantize_asymmetric.register_fake
def _(x: torch.Tensor, dims: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scale = x.amax(dims, keepdim=True)
    return torch.empty_like(x, dtype=torch.int8), scale, scale.to(torch.int8)


@torch.library.custom_op("simulator::dynamic_quantize_mxfp4", mutates_args=())
def dynamic_quantize_mxfp4(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize groups of the last axis to fp4 numbers, one a byte, and powers of two as scales.

    A number is held as a float8 of its value. The greatest of a group has the exponent of 4.
    """
    groups = torch.unflatten(x, -1, (-1, group))
    peak = groups.abs().amax(-1, keepdim=True)
    exponent = torch.where(peak == 0, -127, torch.frexp(peak).exponent - 3).clamp(-127, 127)
    # The least scale, 2^-127, is not a normal float32: the simulator divides by 2^-126 instead.
    scaled = groups / torch.ldexp(torch.ones_like(peak), exponent.clamp(min=-126))
    size = scaled.abs()
    # Two bits of precision: steps of a half below 2, of one below 4, then of two.
    step = torch.ldexp(torch.ones_like(size), (torch.frexp(size).exponent - 2).clamp(min=-1))
    rounded = torch.copysign(((size / step).round() * step).clamp(max=MXFP4_VALUES[-1]), scaled)
    scale = (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return rounded.flatten(-2).to(torch.float8_e4m3fn), scale.squeeze(-1)


@dynamic_quantize_mxfp4.register_fake
def _(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*x.shape[:-1], x.shape[-1] // group)
    scale = x.new_empty(shape, dtype=torch.float8_e8m0fnu)
    return torch.empty_like(x, dtype=torch.float8_e4m3fn), scale


@torch.library.custom_op("simulator::static_quant_linear", mutates_args=())
def static_quant_linear(  # noqa: PLR0913, PLR0917  (that is how it is)
    x: torch.Tensor,
    x_scale: float,
    x_zero_point: int,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_scale: float,
    out_zero_point: int,
) -> torch.Tensor:
    """Multiply int8 by int8 weights of one scale per row, and quantize the result to int8."""
    real_x = (x.float() - x_zero_point) * x_scale
    real_w = weight.float() * weight_scale.unsqueeze(-1)
    y = F.linear(real_x, real_w, bias)
    return ((y / out_scale).round() + out_zero_point).clamp(-128, 127).to(torch.int8)


@static_quant_linear.register_fake
def _(  # noqa: PLR0913, PLR0917
    x: torch.Tensor,
    x_scale: float,
    x_zero_point: int,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_scale: float,
    out_zero_point: int,
) -> torch.Tensor:
    del x_scale, x_zero_point, weight_scale, bias, out_scale, out_zero_point
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """Return the int4 numbers of ``packed`` as int8: two a byte, the low half first, plus 8."""
    both = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    return both.to(torch.int8) - 8


def pack_int4(numbers: torch.Tensor) -> torch.Tensor:
    """Return what :func:`unpack_int4` unpacks to ``numbers``."""
    low, high = (numbers + 8).to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4)


@torch.library.custom_op("simulator::int4_linear", mutates_args=())
def int4_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    group: int,
) -> torch.Tensor:
    """Multiply float by packed int4 weights ``[N, K / 2]`` with scales ``[N, K / group]``."""
    real = unpack_int4(weight).to(x.dtype) * scale.repeat_interleave(group, -1)
    return F.linear(x, real, bias)


@int4_linear.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    group: int,
) -> torch.Tensor:
    del scale, bias, group
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.custom_op("simulator::fp8_linear", mutates_args=())
def fp8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiply float by float8 weights of one scale per row."""
    return F.linear(x, weight.to(x.dtype) * scale.unsqueeze(-1), bias)


@fp8_linear.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    del scale, bias
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.custom_op("simulator::mxfp4_linear", mutates_args=())
def mxfp4_linear(
    x: torch.Tensor, weight: torch.Tensor, exponent: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiply float by fp4 codes, one a byte, with int8 exponents per group."""
    values = torch.tensor(MXFP4_CODES, device=x.device)
    scale = exponent.float().exp2().repeat_interleave(weight.shape[-1] // exponent.shape[-1], -1)
    return F.linear(x, (values[weight.int()] * scale).to(x.dtype), bias)


@mxfp4_linear.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, exponent: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    del exponent, bias
    return x.new_empty((*x.shape[:-1], weight.shape[0]))
