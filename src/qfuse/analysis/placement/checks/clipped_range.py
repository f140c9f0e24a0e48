"""A static range that is too small for what the example inputs reach."""

from __future__ import annotations

from collections.abc import Iterator

from qfuse.analysis.placement.check import LintCheck
from qfuse.analysis.placement.finding import LintFinding, Severity
from qfuse.analysis.placement.graph import LintGraph
from qfuse.analysis.placement.observe import Observed
from qfuse.analysis.placement.operands import static
from qfuse.ir.ops.qdq import as_quantize

# A range that covers everything has at most a quarter of the squared error: 6 dB, or one bit.
_GAIN = 4.0


class ClippedRange(LintCheck):
    """A static quantize that clips values, where a wider range has a smaller error.

    Calibration may clip on purpose: a smaller scale rounds the other values better. It is reported
    only if a range that covers the example has at most a quarter of the squared error.
    """

    code = "clipped-range"

    def find(self, graph: LintGraph) -> Iterator[LintFinding]:
        """Look at what every static quantize did to the example."""
        for node, seen in graph.observed.items():
            quantize = as_quantize(node)
            if quantize is None or not static(quantize.params) or _is_relu(seen):
                continue
            if seen.clipping * 2 > seen.error > _GAIN * seen.covering:
                count = seen.below + seen.above
                yield self.finding(
                    node,
                    f"{_share(count / seen.elements)} of the example's values lie beyond the range "
                    f"[{seen.least:.4g}, {seen.most:.4g}]; they reach "
                    f"[{seen.low:.4g}, {seen.high:.4g}]",
                    f"calibrate with inputs like these, or a scale of {seen.scale:.4g} "
                    f"and a zero point of {seen.zero_point}",
                    lost_db=seen.lost_db,
                    clipped_fraction=count / seen.elements,
                    range_low=seen.least,
                    range_high=seen.most,
                    value_low=seen.low,
                    value_high=seen.high,
                    error_ratio=seen.error / max(seen.covering, 1e-30),
                )


class RangeAsRelu(LintCheck):
    """A range that begins at zero and clips all negative values: a ReLU by quantization."""

    code = "range-as-relu"
    severity = Severity.INFO

    def find(self, graph: LintGraph) -> Iterator[LintFinding]:
        """Look at what every static quantize did to the example."""
        for node, seen in graph.observed.items():
            quantize = as_quantize(node)
            if quantize is None or not static(quantize.params) or not _is_relu(seen):
                continue
            yield self.finding(
                node,
                f"the range begins at 0 and clips {_share(seen.below / seen.elements)} of the "
                f"example's values, which reach {seen.low:.4g}: the quantize acts as a relu",
                "if no relu is meant here, use a range with negative values",
                lost_db=seen.lost_db,
                clipped_fraction=seen.below / seen.elements,
                value_low=seen.low,
            )


def _is_relu(seen: Observed) -> bool:
    # The fraction is that of a relu, not that of a range that misses a few outliers.
    return seen.least == 0 and not seen.above and seen.below * 10 > seen.elements


def _share(fraction: float) -> str:
    percent = 100 * fraction
    return f"{percent:.1f} %" if percent >= 0.1 else f"{percent:.2g} %"  # noqa: PLR2004
