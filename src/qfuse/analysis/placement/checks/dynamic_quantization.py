"""Parameters that are chosen at run time, with what that costs."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from qfuse.analysis.placement.check import LintCheck
from qfuse.analysis.placement.finding import LintFinding, Severity
from qfuse.analysis.placement.graph import LintGraph
from qfuse.analysis.placement.operands import source_of
from qfuse.ir.dtypes import bit_width
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.library import output_of
from qfuse.ir.ops.qdq import as_choose, as_quantize
from qfuse.ir.ops.views import dtype_of, result_of, results_of


class DynamicQuantization(LintCheck):
    """One finding per model: how many tensors are quantized dynamically, and what it costs."""

    code = "dynamic-quantization"
    severity = Severity.INFO

    def find(self, graph: LintGraph) -> Iterator[LintFinding]:
        """Count what is left of dynamic choices after equal ones were combined."""
        costs = dict(_costs(graph))
        if not costs:
            return
        worst = max(costs, key=lambda node: costs[node])
        total = sum(costs.values())
        count = len(costs)
        yield self.finding(
            worst,
            f"{count} tensor{'s are' if count != 1 else ' is'} quantized with parameters chosen at "
            f"run time; this one costs the most ({costs[worst]:.1f} us)",
            "static parameters from calibration avoid the search for the extremes, if the "
            "accuracy allows it",
            total,
            tensors=count,
        )


def _costs(graph: LintGraph) -> Iterator[tuple[Node, float]]:
    """Yield each choice of the optimized graph with its predicted microseconds."""
    computed: set[Node] = set()
    for node in graph.optimized.graph.nodes:
        quantize = as_quantize(node)
        if quantize is not None and quantize.params.scale not in computed:
            scale = quantize.params.scale
            # A scale that the model computes itself, with ops that are not a known choice.
            if constant_value(scale) is None and not _is_chosen(scale):
                computed.add(scale)
                yield node, graph.pass_us(quantize.x, [bit_width(dtype_of(quantize.x))], [])
        choose = as_choose(node)
        if choose is not None:
            yield node, graph.pass_us(choose.x, [bit_width(dtype_of(choose.x))], [])
            continue
        output = output_of(node)
        if output is not None and output.choose is not None:
            # In the kernel of another op: one more pass over values that are in the cache.
            result = results_of(node).get(0)
            if result is not None:
                yield node, graph.pass_us(result, [32], [], calls=False)


def _is_chosen(scale: Node) -> bool:
    """Whether a scale is chosen by an op that is counted, or is a view of such a scale."""
    while (source := source_of(scale)) is not None:
        scale = source
    return result_of(scale) is not None
