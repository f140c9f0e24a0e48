"""A layer that is so small that quantizing costs more than it saves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from torch.fx import Node

from qfuse.analysis.placement.check import LintCheck
from qfuse.analysis.placement.finding import LintFinding
from qfuse.analysis.placement.graph import LintGraph
from qfuse.analysis.placement.operands import source_of
from qfuse.analysis.products import Product
from qfuse.ir.dtypes import bit_width
from qfuse.ir.events import EXPAND, FLOAT, HOST, Lowered
from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.matmul import FusedMatmul
from qfuse.ir.ops.product import as_fused_product
from qfuse.ir.ops.qdq import Quantize, as_quantize
from qfuse.ir.ops.views import dtype_of

# The prediction is a roofline, so smaller differences say nothing.
_MARGIN = 1.25


class SmallLayer(LintCheck):
    """A product whose kernel and quantize are predicted to be slower than the product in float.

    The time of a quantize is shared by the products that read its result.
    """

    code = "small-layer"

    def find(self, graph: LintGraph) -> Iterator[LintFinding]:
        """Compare every fused product with the float products that it stands for."""
        parts: dict[Node, list[Product]] = {}
        for product in graph.products:
            fused = graph.fused_product(product)
            if fused is not None:
                parts.setdefault(fused, []).append(product)
        readers = _readers(list(parts))
        for fused, merged in parts.items():
            event = graph.lowered_as(fused)
            if event is None or event.kernel in {EXPAND, HOST} or event.predicted is None:
                continue
            # Its rival is the float product already.
            if isinstance(as_fused_product(fused), FusedMatmul):
                continue
            found = self._compare(graph, fused, merged, event, readers)
            if found is not None:
                yield found

    def _compare(
        self,
        graph: LintGraph,
        fused: Node,
        merged: list[Product],
        event: Lowered,
        readers: Counter[Node],
    ) -> LintFinding | None:
        quantize = _standalone(fused)
        passes = 0.0
        if quantize is not None:
            passes = _passes(graph, quantize) / readers[quantize.node]
        assert event.predicted is not None, "only kernels with a prediction are compared"
        kernel = event.predicted * 1e6
        real = sum(graph.float_us(product) for product in merged)
        if kernel + passes <= real * _MARGIN:
            return None
        name = op_name(merged[0].node).removeprefix("aten.")
        product = merged[0]
        k, n = math.prod(map(int, product.k)), math.prod(map(int, product.n))
        where = "float on dequantized values" if event.kernel == FLOAT else event.kernel
        with_quantize = f" and {passes:.1f} us of quantizing" if passes else ""
        return self.finding(
            product.node,
            f"this {name} ({k} to {n} features) is predicted to take {kernel:.1f} us in "
            f"{where}{with_quantize}, and {real:.1f} us in float",
            "leave this layer in float",
            kernel + passes - real,
            quantized_us=kernel + passes,
            float_us=real,
        )


def _standalone(fused: Node) -> Quantize | None:
    """Return the quantize that feeds a fused product and is not part of another op."""
    product = as_fused_product(fused)
    assert product is not None, "only fused products are compared"
    node = product.x
    while as_quantize(node) is None:
        source = source_of(node)
        if source is None:
            return None
        node = source
    return as_quantize(node)


def _readers(products: list[Node]) -> Counter[Node]:
    found = (_standalone(fused) for fused in products)
    return Counter(quantize.node for quantize in found if quantize is not None)


def _passes(graph: LintGraph, quantize: Quantize) -> float:
    bits = bit_width(dtype_of(quantize.x))
    cost = graph.pass_us(quantize.x, [bits], [8])
    if constant_value(quantize.params.scale) is None:
        cost += graph.pass_us(quantize.x, [bits], [])
    return cost
