"""The weights and biases of random convolutions: constants, shared ones, and values of the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from tests.support.strategies.convolutions.geometry import Geometry
from tests.support.strategies.convolutions.grower import ImageGrower
from tests.support.strategies.convolutions.qparams import Qparams, weight_qparams
from torch.fx import Node


@dataclass
class Weights:
    """The quantized weights so far.

    Attributes:
        known: Their quantized values, what they were quantized with, and their float type.
    """

    known: list[tuple[Node, Qparams, torch.dtype]] = field(default_factory=list)

    def draw(self, g: ImageGrower, made: Geometry, float_dtype: torch.dtype) -> Node:
        """Add the weight of a convolution as a float tensor."""
        shape = made.weight_shape
        if g.chance(10):
            return g.b.const(g.name("w"), g.numbers(shape, float_dtype) * (1 if g.exact else 0.2))
        shared = [
            (q, params)
            for q, params, of in self.known
            if tuple(q.meta["val"].shape) == shape and of == float_dtype
        ]
        if shared and g.chance(2):
            q, params = g.pick(shared)
            return params.dequantize(g, q)
        params = weight_qparams(g, shape, float_dtype, transposed=made.transposed)
        q = self._values(g, shape, params, float_dtype)
        self.known.append((q, params, float_dtype))
        return params.dequantize(g, q)

    def _values(
        self, g: ImageGrower, shape: Sequence[int], params: Qparams, float_dtype: torch.dtype
    ) -> Node:
        """Constants most of the time, else an input, or an input that is quantized here."""
        kind = "constant" if g.usual() else g.pick(["input", "quantized"])
        match kind:
            case "input":
                return g.arg("q", params.stored, list(shape))
            case "quantized":
                return params.quantize(g, g.arg("w", float_dtype, list(shape)))
            case _:
                low, high = params.bounds
                values = torch.randint(low, high + 1, tuple(shape), generator=g.random)
                return g.b.const(g.name("q"), values.to(params.stored))


def draw_bias(g: ImageGrower, count: int, float_dtype: torch.dtype) -> Node | None:
    """Add a bias, or none."""
    if g.chance(3):
        return None
    if g.chance(8):
        return g.arg("bias", float_dtype, [count])
    return g.b.const(g.name("bias"), g.numbers((count,), float_dtype))
