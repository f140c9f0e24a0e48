"""An activation whose scale varies along the axis that its product sums over."""

from __future__ import annotations

from collections.abc import Iterator

from qfuse.analysis.placement.check import LintCheck
from qfuse.analysis.placement.finding import LintFinding
from qfuse.analysis.placement.graph import LintGraph
from qfuse.analysis.placement.operands import Encoded, encoded
from qfuse.analysis.products import Product
from qfuse.ir.graph.stage_graph import constant_of, op_name
from qfuse.ir.ops.constants import is_constant_expression


class PerChannelActivation(LintCheck):
    """A quantized product whose activation has several scales along the summed axis.

    ``sum_k q[m, k] * s[k] * w[k, n]`` is not a product of integers times a scale, so it is computed
    in float. A depthwise convolution does not sum over channels and is not reported.
    """

    code = "per-channel-activation"

    def find(self, graph: LintGraph) -> Iterator[LintFinding]:
        """Look at the activations of every product of two quantized operands."""
        for product in graph.products:
            x, other = encoded(product.x), encoded(product.other)
            if x is None or other is None or product.depthwise:
                continue
            if graph.computes_quantized(product):
                continue
            activation = [(x, product.x_summed)]
            if not is_constant_expression(other.op.node):
                activation.append((other, product.other_summed))
            for operand, axis in activation:
                if _is_activation(operand) and operand.varies(axis):
                    yield self._finding(graph, product, operand, axis)

    def _finding(self, graph: LintGraph, product: Product, x: Encoded, axis: int) -> LintFinding:
        spec = x.params.spec
        name = op_name(product.node).removeprefix("aten.")
        return self.finding(
            product.node,
            f"the activation of this {name} has scales in blocks of {spec.block_text()}, which "
            f"vary along the axis {axis} that is summed, so it is computed in float",
            "quantize the activation with one scale per tensor or per row",
            graph.float_us(product) - graph.int8_us(product),
            block=spec.block_text(),
            axis=axis,
        )


def _is_activation(x: Encoded) -> bool:
    return constant_of(x.op.q) is None and x.params.spec.is_plain
