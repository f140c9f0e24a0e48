"""Reference semantics of the canonical quantization ops, in plain torch.

Every formula matches its source bit for bit; the sources are the Python references of
``torch.ops.quantized_decomposed`` and torchao's ``quant_primitives``, and for
microscaling torchao's ``prototype.mx_formats``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from qfuse.ir.quant.element import Element, ScaleFormat, round_to_element, scale_divisor
from qfuse.ir.quant.spec import Block, QuantSpec, ZeroPointDomain


def expand_blocks(values: torch.Tensor, block: Block, shape: Sequence[int]) -> torch.Tensor:
    """Expand one value per block to a tensor of ``shape``.

    Axes with one block keep size 1 and broadcast; only axes with several blocks are repeated.

    Args:
        values: One entry per block, in the rank of ``shape``.
        block: Block sizes; ``None`` is the whole axis.
        shape: Shape of the tensor.
    """
    for axis, (size, b) in enumerate(zip(shape, block, strict=True)):
        if b is not None and b > 1 and values.shape[axis] != 1:
            # The last block of an axis may be partial.
            values = values.repeat_interleave(b, axis).narrow(axis, 0, size)
    return values


def quantize(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    spec: QuantSpec,
    outer_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Quantize ``x``: ``clamp(round(x * (1 / scale)) + zero_point, quant_min, quant_max)``.

    Args:
        x: Float tensor of dtype ``spec.float_dtype``.
        scale: Shape ``spec.grid(x.shape)``, any float dtype, or that of ``spec.scale``.
        zero_point: The same shape, or ``None``.
        spec: Everything else. Rounding is half to even.
        outer_scale: The second level of scales, if the spec has one: one per block ``spec.outer``.

    Returns:
        A tensor of ``x``'s shape and dtype ``spec.dtype``.
    """
    _check_levels(spec, outer_scale)
    math = spec.arithmetic
    if spec.domain is ZeroPointDomain.FLOAT_OFFSET:
        return _quantize_offset(x, scale, zero_point, spec)
    factor = _divisor(scale, outer_scale, spec, x.shape)
    y = x.to(math.compute)
    y = y * factor if math.reciprocal else y / factor
    if spec.dtype.is_floating_point:
        # torch's casts to float8 do not saturate.
        y = y.clamp(spec.quant_min, spec.quant_max)
        if spec.element is not Element.WHOLE:
            y = round_to_element(y, spec.element)
        return y.to(spec.dtype)
    if zero_point is not None:
        zero = expand_blocks(zero_point.to(math.compute), spec.block, x.shape)
        # The order matters at ties: `round(0.5) + 1` is 1, `round(0.5 + 1)` is 2.
        y = (y + zero).round() if math.zero_point_first else y.round() + zero
    else:
        y = y.round()
    return y.clamp(spec.quant_min, spec.quant_max).to(spec.dtype)


def _check_levels(spec: QuantSpec, outer_scale: torch.Tensor | None) -> None:
    """Check the scale levels: a missing or extra one would silently give wrong values."""
    assert (spec.outer is None) == (outer_scale is None), f"as many levels of scales as in {spec}"


def _divisor(
    scale: torch.Tensor, outer_scale: torch.Tensor | None, spec: QuantSpec, shape: Sequence[int]
) -> torch.Tensor:
    """Return the divisor of quantize, or its reciprocal, broadcastable to ``shape``."""
    compute, reciprocal = spec.arithmetic.compute, spec.arithmetic.reciprocal
    if outer_scale is not None and spec.outer is not None:
        outer = expand_blocks(outer_scale.to(compute), spec.outer, shape)
        inner = expand_blocks(scale.to(compute), spec.block, shape)
        # Not `1 / (outer * inner)`, whose last bit differs from that of torchao.
        return outer.reciprocal() / inner if reciprocal else outer * inner
    if spec.scale_format is ScaleFormat.E8M0:
        factor = scale_divisor(scale, reciprocal=reciprocal)
    else:
        factor = scale if spec.scale_format is ScaleFormat.FLOAT else scale.to(compute)
        # In the scale's own dtype, as the sources take it: a float64 literal has another reciprocal
        # than the float32 tensor of it.
        factor = factor.reciprocal() if reciprocal else factor
    return expand_blocks(factor.to(compute), spec.block, shape)


def dequantize(
    q: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    spec: QuantSpec,
    outer_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Dequantize ``q``: ``((q - zero_point) * scale)`` in ``spec.arithmetic.compute``.

    Quantized values are not clamped to the range.

    Args:
        q: Quantized values of dtype ``spec.dtype``.
        scale: Shape ``spec.grid(q.shape)``.
        zero_point: The same shape, or ``None``.
        spec: Everything else.
        outer_scale: The second level of scales, if the spec has one.

    Returns:
        A tensor of ``q``'s shape and dtype ``spec.float_dtype``.
    """
    _check_levels(spec, outer_scale)
    compute = spec.arithmetic.compute
    factor = expand_blocks(scale.to(compute), spec.block, q.shape)
    if outer_scale is not None and spec.outer is not None:
        factor = expand_blocks(outer_scale.to(compute), spec.outer, q.shape) * factor
    x = q.to(compute)
    if zero_point is None:
        return (x * factor).to(spec.float_dtype)
    zero = expand_blocks(zero_point.to(compute), spec.block, q.shape)
    if spec.domain is ZeroPointDomain.FLOAT_OFFSET:
        middle = (spec.quant_max + spec.quant_min + 1) / 2
        return ((x - middle) * factor + zero).to(spec.float_dtype)
    return ((x - zero) * factor).to(spec.float_dtype)


def _quantize_offset(
    x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, spec: QuantSpec
) -> torch.Tensor:
    """Quantize with a float offset: ``round((x - (zero - scale * middle)) / scale)``."""
    compute = spec.arithmetic.compute
    middle = (spec.quant_max + spec.quant_min + 1) / 2
    zero = torch.zeros_like(scale) if zero_point is None else zero_point
    least = expand_blocks((zero - scale * middle).to(compute), spec.block, x.shape)
    factor = expand_blocks(scale.to(compute), spec.block, x.shape)
    y = ((x.to(compute) - least) / factor).round()
    return y.clamp(spec.quant_min, spec.quant_max).to(spec.dtype)


def reduce_blocks(x: torch.Tensor, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the minimum and maximum of every block, in the rank of ``x``.

    A partial last block is reduced over its existing elements.
    """
    return _reduce(x, block, torch.amin), _reduce(x, block, torch.amax)


def peaks(x: torch.Tensor, block: Block) -> torch.Tensor:
    """Return the maximum magnitude of every block, in the rank of ``x``; NaN propagates."""
    return _reduce(x.abs(), block, torch.amax)


def _reduce(x: torch.Tensor, block: Block, op: Callable[..., torch.Tensor]) -> torch.Tensor:
    for axis, b in enumerate(block):
        if b is None:
            x = op(x, axis, keepdim=True)
        elif b != 1:
            parts = torch.split(x, b, axis)
            x = torch.cat([op(part, axis, keepdim=True) for part in parts], axis)
    return x
