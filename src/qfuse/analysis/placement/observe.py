"""Run the example through the normal form, and measure what every static quantize does to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.ops.qdq import Quantize, as_quantize
from qfuse.ir.quant.reference import dequantize, expand_blocks, reduce_blocks
from qfuse.ir.quant.spec import QuantSpec, ZeroPointDomain
from qfuse.ir.signature.run import running_examples


@dataclass(frozen=True, slots=True)
class Observed:
    """What one quantize did to the values of the example.

    Attributes:
        elements: Number of finite values.
        low: The smallest one.
        high: The largest one.
        least: The smallest value that the range represents.
        most: The largest one.
        below: Number of values below the range, by more than half a step.
        above: Number of values above it.
        error: Sum of the squared errors.
        clipping: The part of it that is due to values beyond the range.
        covering: The sum of squared errors that is expected of a range that covers all values.
        scale: The greatest scale of such a range.
        zero_point: The zero point of such a range, if it has one scale.
        levels: The levels between the smallest and the largest quantized value that occur, in the
            block where they are most.
        blocks: The number of scales.
    """

    elements: int
    low: float
    high: float
    least: float
    most: float
    below: int
    above: int
    error: float
    clipping: float
    covering: float
    scale: float
    zero_point: int
    levels: int
    blocks: int

    @property
    def lost_db(self) -> float:
        """How much more noise there is than with a range that covers all values."""
        least = 1e-30
        return max(10 * math.log10(max(self.error, least) / max(self.covering, least)), 0.0)


def observe(program: NormalGraph, inputs: Sequence[torch.Tensor]) -> dict[Node, Observed]:
    """Run ``program`` and return what was observed, by the node of each quantize.

    Quantizes to float formats, to narrow elements, and of tensors without finite values are absent.

    Raises:
        CaptureError: The model does not run on them.
    """
    observer = _Observer(program.module)
    with running_examples(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        observer.run(*inputs)
    return observer.observed


class _Observer(Interpreter):
    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.observed: dict[Node, Observed] = {}

    def run_node(self, n: Node) -> Any:
        """Run a node; its operands are still in the environment."""
        result = super().run_node(n)
        quantize = as_quantize(n)
        if quantize is not None and is_integer(quantize.params.spec):
            found = self._observe(quantize, result)
            if found is not None:
                self.observed[n] = found
        return result

    def _observe(self, op: Quantize, q: torch.Tensor) -> Observed | None:
        spec = op.params.spec
        x = self.env[op.x].to(torch.float32)
        scale = self.env[op.params.scale].to(torch.float32)
        zero = None if op.params.zero_point is None else self.env[op.params.zero_point]
        return measure_quantize(x, q, scale, zero, spec)


def is_integer(spec: QuantSpec) -> bool:
    """Whether values are stored as plain integers with an integer zero point or none."""
    whole = not spec.dtype.is_floating_point and spec.domain is not ZeroPointDomain.FLOAT_OFFSET
    return whole and spec.is_plain


def measure_quantize(
    x: torch.Tensor,
    q: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    spec: QuantSpec,
) -> Observed | None:
    """Return what quantizing ``x`` to ``q`` did; ``None`` without finite values."""
    finite = torch.isfinite(x)
    count = int(finite.sum())
    if not count:
        return None
    clean = torch.where(finite, x, 0.0)
    step = expand_blocks(scale, spec.block, x.shape)
    shift = 0 if zero is None else expand_blocks(zero.to(torch.float32), spec.block, x.shape)
    least, most = (spec.quant_min - shift) * step, (spec.quant_max - shift) * step
    below, above = clean < least - step / 2, clean > most + step / 2
    real = dequantize(q, scale, zero, spec).to(torch.float32)
    errors = torch.where(finite, (clean - real).double().square(), 0.0)
    covering, new_scale, new_zero = _covering(clean, spec, signed=zero is None)
    lows, highs = reduce_blocks(q, spec.block)
    return Observed(
        count,
        float(clean.min()),
        float(clean.max()),
        float(least.min()),
        float(most.max()),
        int((below & finite).sum()),
        int((above & finite).sum()),
        float(errors.sum()),
        float(errors[below | above].sum()),
        covering,
        new_scale,
        new_zero,
        int((highs.long() - lows.long()).max()) + 1,
        scale.numel(),
    )


def _covering(x: torch.Tensor, spec: QuantSpec, *, signed: bool) -> tuple[float, float, int]:
    """Return the expected squared error of a range over all values, its scale and zero point."""
    low, high = (bound.double() for bound in reduce_blocks(x, spec.block))
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    if signed and spec.quant_min < 0:
        scale = torch.maximum(-low / -spec.quant_min, high / max(spec.quant_max, 1))
        zero = torch.zeros_like(scale)
    else:
        scale = (high - low) / max(spec.quant_max - spec.quant_min, 1)
        zero = spec.quant_min - (low / scale.clamp(min=1e-30)).round()
    per_block = x.numel() / max(scale.numel(), 1)
    error = float(scale.square().sum()) * per_block / 12
    return error, float(scale.max()), int(zero.reshape(-1)[0])
