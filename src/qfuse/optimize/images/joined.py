"""Quantized images that are joined along their channels as floats, with a scale for each image."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from qfuse.ir.memory_formats import CHANNELS
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.qdq import Dequantize, as_dequantize
from qfuse.ir.ops.views import QuantParams, dtype_of, shape_of
from qfuse.ir.quant.block import is_whole
from qfuse.ir.quant.spec import QuantSpec
from qfuse.optimize.commute.join import as_join
from qfuse.rewrite.prelude import Node, Rewriter, aten


@dataclass(frozen=True, slots=True)
class JoinedImages:
    """``cat([dequantize(a, s_a), dequantize(b, s_b)], 1)``, with known parameters per image.

    Attributes:
        parts: The quantized images.
        spec: How they are dequantized when they are joined: one scale per channel.
        scale: One scale per channel, in the rank of the images.
        zero_point: Likewise, or ``None``.
        hint: A name for the parameters.
    """

    parts: tuple[Node, ...]
    spec: QuantSpec
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    hint: str

    def make(self, rw: Rewriter) -> tuple[Node, QuantParams]:
        """Join the quantized values; return them and their parameters."""
        q = rw.call(aten.cat.default, list(self.parts), CHANNELS)
        scale = rw.constant(self.scale, f"{self.hint}_scale")
        zero = self.zero_point
        node = None if zero is None else rw.constant(zero, f"{self.hint}_zero_point")
        return q, QuantParams(self.spec, scale, node)


def images_of_cat(x: object) -> JoinedImages | None:
    """View ``x`` as such a cat.

    ``None`` if it is none, if the images differ in more than their parameters, or if parameters or
    numbers of channels are not known.
    """
    join = as_join(x)
    if join is None or join.is_stack or join.axis != CHANNELS:
        return None
    found = [as_dequantize(part) for part in join.parts]
    parts = [part for part in found if part is not None]
    if len(parts) < len(found) or not _are_alike(parts):
        return None
    scales = [_per_channel(part.q, part.params.scale) for part in parts]
    zeros = [_per_channel(part.q, part.params.zero_point) for part in parts]
    known_scales = [scale for scale in scales if scale is not None]
    known_zeros = [zero for zero in zeros if zero is not None]
    missing = [part for part in parts if part.params.zero_point is None]
    if len(known_scales) < len(parts) or len(known_zeros) + len(missing) < len(parts):
        return None
    # Half of the images without a zero point would need zeros of the others' dtype.
    if missing and known_zeros:
        return None
    rank = len(shape_of(join.node))
    block = tuple(1 if axis == CHANNELS else None for axis in range(rank))
    return JoinedImages(
        tuple(part.q for part in parts),
        replace(parts[0].params.spec, block=block),
        torch.cat(known_scales, CHANNELS),
        torch.cat(known_zeros, CHANNELS) if known_zeros else None,
        join.node.name,
    )


def _are_alike(parts: list[Dequantize]) -> bool:
    """Whether the images are dequantized in one way, each with one scale."""
    first = parts[0].params
    return all(
        part.params.spec == first.spec
        and part.params.outer_scale is None
        and is_whole(part.params.spec.block, shape_of(part.q))
        and dtype_of(part.params.scale) is dtype_of(first.scale)
        for part in parts
    )


def _per_channel(q: Node, parameter: Node | None) -> torch.Tensor | None:
    """Return a known parameter of one number, repeated for every channel of ``q``."""
    value = None if parameter is None else constant_value(parameter)
    channels = shape_of(q)[CHANNELS]
    if value is None or value.numel() != 1 or not isinstance(channels, int):
        return None
    sizes = [channels if axis == CHANNELS else 1 for axis in range(len(shape_of(q)))]
    return value.reshape(()).expand(sizes).contiguous()
