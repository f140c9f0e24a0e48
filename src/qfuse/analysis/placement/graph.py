"""The graphs of one model that the checks look at, and the cost model that prices findings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from qfuse.analysis.placement.observe import Observed, observe
from qfuse.analysis.products import Product, products_of
from qfuse.cost import pointwise_work, size_range, without_calls
from qfuse.cost.model import CostModel
from qfuse.ir.events import NO_KERNELS, Lowered
from qfuse.ir.graph.stage_graph import CapturedGraph, LoweredGraph, NormalGraph, OptimizedGraph
from qfuse.ir.ops.product import as_fused_product
from qfuse.ir.ops.views import shape_of
from qfuse.normalize import normalize
from qfuse.optimize import optimize
from qfuse.pipeline import Pipeline
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.rewriter import origins


@dataclass(frozen=True)
class LintGraph:
    """One model at three stages, with what its example inputs do.

    Attributes:
        normal: The canonical form: all quantization as ops of qfuse.
        optimized: The fused graph.
        lowered: The plan; its log says what runs each fused op.
        cost: Prices findings.
        observed: What each static quantize of ``normal`` did to the example.
        products: The products of ``normal``.
    """

    normal: NormalGraph
    optimized: OptimizedGraph
    lowered: LoweredGraph
    cost: CostModel
    observed: Mapping[Node, Observed]
    products: tuple[Product, ...]
    _lowered_at: Mapping[str, Lowered] = field(repr=False)
    _fused_from: Mapping[str, Node] = field(repr=False)

    @classmethod
    def of(
        cls, captured: CapturedGraph, inputs: Sequence[torch.Tensor], pipeline: Pipeline
    ) -> LintGraph:
        """Run the stages on copies of ``captured``, and the normal form on the inputs."""
        normal = normalize(clone(captured), RewriteContext("normalize", pipeline.cost))
        return cls.of_normal(normal, inputs, pipeline)

    @classmethod
    def of_normal(
        cls, normal: NormalGraph, inputs: Sequence[torch.Tensor], pipeline: Pipeline
    ) -> LintGraph:
        """Run the later stages on copies of ``normal``."""
        optimized = optimize(
            clone(normal),
            RewriteContext("optimize", pipeline.cost),
            added=pipeline.extensions.rules,
        )
        lowered = pipeline.lower(clone(optimized), RewriteContext("lower", pipeline.cost))
        fused = {
            name: node
            for node in optimized.graph.nodes
            if as_fused_product(node) is not None
            for name in origins(node)
        }
        return cls(
            normal,
            optimized,
            lowered,
            pipeline.cost,
            observe(normal, inputs),
            tuple(products_of(normal.graph)),
            {event.place.node: event for event in lowered.log.of(Lowered)},
            fused,
        )

    def lowered_as(self, fused: Node) -> Lowered | None:
        """Return what runs a fused op of the optimized graph."""
        return self._lowered_at.get(fused.name)

    def fused_product(self, product: Product) -> Node | None:
        """Return the fused op that a product of the normal form became part of, if any."""
        found = (self._fused_from.get(name) for name in origins(product.node))
        return next((node for node in found if node is not None), None)

    def lowered_product(self, product: Product) -> Lowered | None:
        """Return what runs a product of the normal form; ``None`` if it stays in float."""
        fused = self.fused_product(product)
        return None if fused is None else self.lowered_as(fused)

    def computes_quantized(self, product: Product) -> bool:
        """Whether a kernel multiplies the quantized values of both operands."""
        lowered = self.lowered_product(product)
        # Where the activation is dequantized, the kernel reads the quantized weight alone.
        return lowered is not None and lowered.kernel not in NO_KERNELS and not lowered.dequantized

    def float_us(self, product: Product) -> float:
        """Return the predicted microseconds of a product in float."""
        return self.cost.seconds(product.float_work(self.normal.signature.symbols)) * 1e6

    def int8_us(self, product: Product) -> float:
        """Return the predicted microseconds of a product of 8-bit operands."""
        return self.cost.seconds(product.int8_work(self.normal.signature.symbols)) * 1e6

    def pass_us(
        self, node: Node, reads: Sequence[int], writes: Sequence[int], *, calls: bool = True
    ) -> float:
        """Return the predicted microseconds of one pass over every element of a tensor.

        Args:
            node: The tensor.
            reads: Bits per element of each tensor read.
            writes: Bits per element of each tensor written.
            calls: Whether it is an op of its own.
        """
        elements = size_range(math.prod(shape_of(node)), self.normal.signature.symbols)
        work = pointwise_work(elements, reads, writes)
        return self.cost.seconds(work if calls else without_calls(work)) * 1e6
