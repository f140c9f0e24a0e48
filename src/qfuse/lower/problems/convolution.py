"""The problem that kernels see for a fused convolution."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.cost import size_range
from qfuse.cost.sizes import SizeRange
from qfuse.ir.graph.stage_graph import SymbolRange
from qfuse.ir.ops.convolution import FusedConvolution
from qfuse.ir.ops.views import shape_of
from qfuse.lower.problems.product import ProductProblem
from qfuse.lower.select.kernel import CONVOLUTION, Span


@dataclass(frozen=True, slots=True)
class ConvolutionProblem(ProductProblem):
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
        """Whether every group has a single input channel."""
        return not self.fused.transposed and self.fused.groups == self.channels


def convolution_problem(
    fused: FusedConvolution, symbols: Mapping[str, SymbolRange]
) -> ConvolutionProblem:
    """Describe ``fused`` for the kernels, with the ranges of its dynamic sizes."""
    first, second, *kernel = (int(size) for size in shape_of(fused.weight))
    n, channels = (second * fused.groups, first) if fused.transposed else (first, second)
    depth = (channels // fused.groups if fused.transposed else channels) * math.prod(kernel)
    axes = len(kernel)
    shape = shape_of(fused.node)
    images = shape[:-axes-1]
    rows: int | torch.SymInt = 1
    for size in (*images, *shape[-axes:]):
        rows = rows * size
    elements: int | torch.SymInt = 1
    for size in shape_of(fused.x):
        elements = elements * size
    return ConvolutionProblem(
        fused,
        size_range(rows, symbols),
        n,
        depth,
        fused.real,
        size_range(elements, symbols),
    )
