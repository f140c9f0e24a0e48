"""A value that is quantized twice in a row, with different parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from qfuse.analysis.placement.check import LintCheck
from qfuse.analysis.placement.finding import LintFinding
from qfuse.analysis.placement.graph import LintGraph
from qfuse.analysis.placement.operands import Encoded, encoded, one_scale, same_numbers, scale_text
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.qdq import Quantize, as_quantize
from qfuse.ir.ops.views import shape_of
from qfuse.ir.quant.block import same_grid


class DoubleRounding(LintCheck):
    """``quantize(dequantize(q, a), b)``, also with movements in between.

    The second quantize rounds values that lie on the grid of the first one, which adds an error and
    a pass over the tensor.
    """

    code = "double-rounding"

    def find(self, graph: LintGraph) -> Iterator[LintFinding]:
        """Look at the operand of every quantize."""
        for node in graph.normal.graph.nodes:
            quantize = as_quantize(node)
            first = None if quantize is None else encoded(quantize.x)
            if quantize is None or first is None or _same(first, quantize):
                continue
            yield self._finding(graph, first, quantize)

    def _finding(self, graph: LintGraph, first: Encoded, second: Quantize) -> LintFinding:
        saved = graph.pass_us(second.node, [8], [8])
        constant = constant_of(first.op.q) is not None
        what = "a quantized weight" if constant else "a quantized tensor"
        before, after = first.params, second.params
        numbers: dict[str, float | int | str] = {
            "first": str(before.spec),
            "second": str(after.spec),
        }
        scales = one_scale(before), one_scale(after)
        if scales[0] and scales[1]:
            numbers["scale_ratio"] = scales[1] / scales[0]
        found = self.finding(
            second.node,
            f"{what} ({scale_text(before)}) is dequantized and quantized again "
            f"({scale_text(after)}) without a computation in between",
            "use the parameters of the first quantize for the second one, or remove the first",
            saved,
        )
        return replace(found, numbers=numbers)


def _same(first: Encoded, second: Quantize) -> bool:
    """Whether the second quantize repeats the first one, so that nothing is rounded."""
    if first.params.same_as(second.params):
        return True
    if first.has_one_scale:
        return same_numbers(first.params, second.params)
    # Several scales were moved along with the values; if the grids are alike and both are chosen
    # at run time, the second choice may differ from the first one.
    spec = second.params.spec
    alike = first.block is not None and same_grid(first.block, spec.block, shape_of(second.node))
    return alike and first.params.scale in _ancestors(second)


def _ancestors(op: Quantize) -> set[object]:
    """Return the nodes that the scale of ``op`` is a view of."""
    found: set[object] = set()
    node = op.params.scale
    while node not in found:
        found.add(node)
        sources = node.all_input_nodes
        if len(sources) == 1:
            node = sources[0]
    return found
