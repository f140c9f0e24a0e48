"""The problem that kernels see for a fused convolution."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from qfuse.cost import size_range
from qfuse.cost.sizes import SizeRange
from qfuse.ir.graph.stage_graph import SymbolRange
from qfuse.ir.ops.convolution import FusedConvolution
from qfuse.ir.ops.views import shape_of
from qfuse.ir.sizes import product
from qfuse.lower.problems.product import WeightedProblem
from qfuse.lower.problems.span import CONVOLUTION, Span


@dataclass(frozen=True, slots=True)
class ConvolutionProblem(WeightedProblem):
    """A fused convolution as kernels see it.

    Its rows are the output pixels of all images. ``k`` counts the products per output element:
    taps times the input channels of a group.

    Attributes:
        elements: Elements of the input.
    """

    fused: FusedConvolution
    elements: SizeRange

    rule: ClassVar[str] = "lower-convolution"

    @property
    def span(self) -> Span:
        """A convolution."""
        return CONVOLUTION

    @property
    def kernel(self) -> tuple[int, ...]:
        """The taps per spatial axis."""
        return tuple(int(size) for size in shape_of(self.fused.weight)[2:])

    @property
    def channels(self) -> int:
        """The input channels."""
        fused = self.fused
        return int(shape_of(fused.weight)[0 if fused.transposed else 1]) * (
            1 if fused.transposed else fused.groups
        )

    @property
    def is_depthwise(self) -> bool:
        """Whether each of several groups has a single input channel."""
        return not self.fused.transposed and self.fused.groups == self.channels > 1


def convolution_problem(
    fused: FusedConvolution, symbols: Mapping[str, SymbolRange]
) -> ConvolutionProblem:
    """Describe ``fused`` for the kernels, with the ranges of its dynamic sizes."""
    first, second, *kernel = (int(size) for size in shape_of(fused.weight))
    n, depth = first, second
    if fused.transposed:
        # The weight of a transposed convolution is [in, out / groups, *kernel].
        n, depth = second * fused.groups, first // fused.groups
    shape = shape_of(fused.node)
    pixels = product((*shape[: fused.axis], *shape[fused.axis + 1 :]))
    return ConvolutionProblem(
        fused,
        fused.float_dtype,
        size_range(pixels, symbols),
        n,
        depth * math.prod(kernel),
        size_range(product(shape_of(fused.x)), symbols),
    )
