"""Quantized convolutions as a source graph has them, for tests of lowering."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx import Node
from torch.fx.node import Argument

from qfuse import kernels
from qfuse.cost import CostModel, CostProfile
from qfuse.ir.graph.stage_graph import LoweredGraph, NormalGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.spec import QuantSpec
from qfuse.lower import Wishes, lower
from qfuse.lower.floats.policy import QUANTIZED
from qfuse.lower.kernels.registry import all_kernels
from qfuse.optimize import optimize
from qfuse.rewrite.clone import clone
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import stored_like

aten = torch.ops.aten
OPS = {1: aten.conv1d.default, 2: aten.conv2d.default, 3: aten.conv3d.default}
TRANSPOSED = {
    1: aten.conv_transpose1d.default,
    2: aten.conv_transpose2d.input,
    3: aten.conv_transpose3d.input,
}


def spec_of(
    rank: int, dtype: torch.dtype = torch.int8, axis: int | None = None, least: int | None = None
) -> QuantSpec:
    """Return a spec with one scale, or one per index of ``axis``."""
    low, high = (-128, 127) if dtype is torch.int8 else (0, 255)
    block = tuple(1 if i == axis else None for i in range(rank))
    return QuantSpec(dtype, low if least is None else least, high, block)


@dataclass(frozen=True)
class ConvolutionCase:
    """A convolution of quantized operands; a size is a number, or the name of a dynamic one."""

    shape: tuple[int | str, ...] = (2, 6, 9, 8)
    out: int = 10
    kernel: tuple[int, ...] = (3, 3)
    stride: int = 1
    padding: int = 1
    dilation: int = 1
    groups: int = 1
    transposed: bool = False
    output_padding: int = 0
    x: torch.dtype = torch.uint8
    zero: int = 100
    weight: torch.dtype = torch.int8
    axis: int | None = 0
    block: int | None = None  # input channels with a scale of their own, per output channel
    weight_zero: int | None = None
    bias: bool = True
    memory_format: torch.memory_format = torch.contiguous_format
    float_dtype: torch.dtype = torch.float32

    @property
    def channels(self) -> int:
        """Input channels."""
        channels = self.shape[-len(self.kernel) - 1]
        assert isinstance(channels, int)
        return channels

    def add(self, b: GraphBuilder, x: Node) -> Node:
        """Quantize ``x`` and convolve it."""
        spatial = len(self.kernel)
        spec = replace(spec_of(len(self.shape), self.x), float_dtype=self.float_dtype)
        grid = [1] * len(self.shape)
        scale = b.const("x_scale", torch.full(grid, 0.05))
        zero = b.const("x_zero", torch.full(grid, self.zero, dtype=torch.int32))
        q = b.call(ops.quantize, x, scale, zero, str(spec))
        real = b.call(ops.dequantize, q, scale, zero, str(spec))
        bias = b.const("bias", torch.randn(self.out, dtype=self.float_dtype)) if self.bias else None
        settings: list[Argument] = [[self.stride] * spatial, [self.padding] * spatial]
        if self.transposed:
            settings += [[self.output_padding] * spatial, self.groups, [self.dilation] * spatial]
            return b.call(TRANSPOSED[spatial], real, self.stored(b), bias, *settings)
        settings += [[self.dilation] * spatial, self.groups]
        return b.call(OPS[spatial], real, self.stored(b), bias, *settings)

    def stored(self, b: GraphBuilder) -> Node:
        """Add the dequantized weight."""
        first, second = self.out, self.channels // self.groups
        if self.transposed:
            first, second = self.channels, self.out // self.groups
        shape = (first, second, *self.kernel)
        spec = replace(spec_of(len(shape), self.weight, self.axis), float_dtype=self.float_dtype)
        if self.block is not None:
            lead = (self.block, 1) if self.transposed else (1, self.block)
            spec = spec.with_block((*lead, *[None] * len(self.kernel)))
        grid = [int(g) for g in spec.grid(shape)]
        scale = b.const("w_scale", torch.rand(grid) * 0.02 + 1e-3)
        zero = None
        if self.weight_zero is not None:
            zero = b.const("w_zero", torch.full(grid, self.weight_zero, dtype=torch.int32))
        return b.call(
            ops.dequantize, b.const("w", stored_like(spec, *shape)), scale, zero, str(spec)
        )

    def program(self) -> NormalGraph:
        """Return the graph of the convolution alone."""
        b = GraphBuilder()
        return b.done(self.add(b, b.arg("x", torch.float32, *self.shape)))

    def but(self, **changes: object) -> ConvolutionCase:
        """Return the case with some changes."""
        return replace(self, **changes)  # type: ignore[arg-type]


def lowered_convolution(program: NormalGraph, isa: str = "avx2") -> LoweredGraph:
    """Optimize and lower a copy of ``program`` for a pinned target and cost profile."""
    cost = CostModel(CostProfile.pinned())
    target = Target.for_testing(isa=isa)
    # Kernels compete with each other only: products of a few elements are faster in float.
    wishes, registry = Wishes(floats=QUANTIZED), all_kernels(kernels.load())
    return lower(optimize(clone(program)), target, cost, registry, None, wishes)
