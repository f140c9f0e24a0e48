"""A weight that is quantized along its input features."""

from __future__ import annotations

from collections.abc import Iterator

from qfuse.analysis.placement.check import LintCheck
from qfuse.analysis.placement.finding import LintFinding
from qfuse.analysis.placement.graph import LintGraph
from qfuse.analysis.placement.operands import encoded
from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.ops.constants import is_constant_expression


class WeightAxis(LintCheck):
    """A constant weight with a scale per input feature, and not per output feature.

    Its scales cannot leave the sum, so the product is computed in float; groups of input features
    within an output feature are not reported.
    """

    code = "weight-axis"

    def find(self, graph: LintGraph) -> Iterator[LintFinding]:
        """Look at the weight of every product."""
        for product in graph.products:
            weight = encoded(product.other)
            if weight is None or not is_constant_expression(weight.op.node):
                continue
            if product.depthwise or weight.varies(product.other_kept):
                continue
            if not weight.varies(product.other_summed):
                continue
            in_float = not graph.computes_quantized(product)
            saved = graph.float_us(product) - graph.int8_us(product) if in_float else 0.0
            name = op_name(product.node).removeprefix("aten.")
            consequence = ", so it is computed in float" if in_float else ""
            yield self.finding(
                product.node,
                f"the weight of this {name} has one scale per input feature and none per output "
                f"feature (blocks of {weight.params.spec.block_text()}){consequence}",
                "quantize the weight along its output features: axis 0 of a linear or convolution",
                saved,
                block=weight.params.spec.block_text(),
            )
