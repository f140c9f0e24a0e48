"""Quantized values that use a small part of their range."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from qfuse.analysis.placement.check import LintCheck
from qfuse.analysis.placement.finding import LintFinding
from qfuse.analysis.placement.graph import LintGraph
from qfuse.analysis.placement.observe import is_integer
from qfuse.analysis.placement.operands import static
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.qdq import as_dequantize, as_quantize
from qfuse.ir.ops.views import has_values, tensor_of
from qfuse.ir.quant.reference import reduce_blocks

# Two bits of the range are unused.
_UNUSED = 4
# Fewer values say little about the range of all.
_LEAST_VALUES = 64
_LEAST_PER_BLOCK = 16
# Types of more than 8 bits are not full: a bias in int32 has the scale of its product.
_LEAST_LEVELS, _MOST_LEVELS = 8, 256


class WideRange(LintCheck):
    """A static range of which the example uses less than a quarter, or a weight that does.

    Less than 64 values or 16 per scale, and ranges of less than 8 or more than 256 levels, are not
    judged, nor is a tensor that holds one value only. Of several blocks, the one that uses most
    levels counts.
    """

    code = "wide-range"

    def find(self, graph: LintGraph) -> Iterator[LintFinding]:
        """Look at the values of the example, then at the weights."""
        for node, seen in graph.observed.items():
            quantize = as_quantize(node)
            if quantize is None or not static(quantize.params):
                continue
            spec = quantize.params.spec
            levels = spec.quant_max - spec.quant_min + 1
            few = not _enough(seen.elements, seen.blocks)
            if few or not _LEAST_LEVELS <= levels <= _MOST_LEVELS or seen.low == seen.high:
                continue
            if seen.levels * _UNUSED <= levels and not seen.below + seen.above:
                yield self.finding(
                    node,
                    f"the example uses {seen.levels} of {levels} levels: its values lie in "
                    f"[{seen.low:.4g}, {seen.high:.4g}], the range is [{seen.least:.4g}, "
                    f"{seen.most:.4g}]",
                    f"calibrate with inputs like these, or a scale of {seen.scale:.4g} "
                    f"and a zero point of {seen.zero_point}",
                    lost_db=_lost_db(seen.levels, levels),
                    levels_used=seen.levels,
                    levels=levels,
                )
        yield from self._weights(graph)

    def _weights(self, graph: LintGraph) -> Iterator[LintFinding]:
        for node in graph.normal.graph.nodes:
            op = as_dequantize(node)
            q = None if op is None else constant_of(op.q)
            if op is None or q is None or not has_values(q) or not is_integer(op.params.spec):
                continue
            spec = op.params.spec
            levels = spec.quant_max - spec.quant_min + 1
            used = _used(q, spec.block)
            blocks = tensor_of(op.params.scale).numel()
            judged = _LEAST_LEVELS <= levels <= _MOST_LEVELS and used > 1
            if not judged or not _enough(q.numel(), blocks):
                continue
            if used * _UNUSED <= levels:
                yield self.finding(
                    node,
                    f"no block of this weight uses more than {used} of {levels} levels",
                    f"divide its scales by about {levels / used:.2g} and quantize the float weight "
                    "again",
                    lost_db=_lost_db(used, levels),
                    levels_used=used,
                    levels=levels,
                )


def _lost_db(used: int, levels: int) -> float:
    """Return what is gained where steps are as much smaller as there are levels to spare."""
    return 20 * math.log10(levels / used)


def _enough(elements: int, blocks: int) -> bool:
    """Whether there are enough values, in all and per scale, to judge a range by them."""
    return elements >= max(_LEAST_VALUES, _LEAST_PER_BLOCK * blocks)


def _used(q: torch.Tensor, block: tuple[int | None, ...]) -> int:
    """Return the greatest number of levels that one block spans."""
    if not q.numel():
        return 0
    low, high = reduce_blocks(q, block)
    return int((high.long() - low.long()).max()) + 1
