"""Different parameters on the two sides of an op that only selects or joins values."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from qfuse.analysis.placement.check import LintCheck
from qfuse.analysis.placement.finding import LintFinding
from qfuse.analysis.placement.graph import LintGraph
from qfuse.analysis.placement.operands import (
    encoded,
    quantizes_below,
    same_numbers,
    scale_text,
    static,
)
from qfuse.ir.aten import aten
from qfuse.ir.graph.schema import arguments, is_call
from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.ops.qdq import Quantize, as_quantize
from qfuse.ir.ops.views import node_of, results_of

_JOINS = (aten.cat.default, aten.stack.default)
_POOLS = (
    aten.max_pool1d.default,
    aten.max_pool2d.default,
    aten.max_pool3d.default,
    aten.max_pool1d_with_indices.default,
    aten.max_pool2d_with_indices.default,
    aten.max_pool3d_with_indices.default,
    aten.adaptive_max_pool1d.default,
    aten.adaptive_max_pool2d.default,
    aten.adaptive_max_pool3d.default,
    aten.amax.default,
    aten.amin.default,
)


class CatScales(LintCheck):
    """A ``cat`` or ``stack`` of quantized tensors, quantized again with other parameters."""

    code = "cat-scales"

    def find(self, graph: LintGraph) -> Iterator[LintFinding]:
        """Look at every join whose result is quantized."""
        for node in graph.normal.graph.nodes:
            if not is_call(node, *_JOINS):
                continue
            after = _static_below(node)
            if after is None:
                continue
            parts = [node_of(part) for part in _parts(node)]
            others = [part for part in dict.fromkeys(parts) if _differs(part, after)]
            if others:
                yield self._finding(graph, node, parts, others, after)

    def _finding(
        self, graph: LintGraph, node: Node, parts: list[Node], others: list[Node], after: Quantize
    ) -> LintFinding:
        saved = sum(graph.pass_us(part, [8], [8]) for part in others)
        kind = op_name(node).removeprefix("aten.")
        shown = "; ".join(_text(part) for part in others[:3])
        more = f"; and {len(others) - 3} more" if len(others) > 3 else ""  # noqa: PLR2004
        return self.finding(
            node,
            f"{len(others)} of {len(parts)} inputs of this {kind} have other parameters "
            f"({shown}{more}) than its result ({scale_text(after.params)})",
            f"use the parameters of the result for every input of the {kind}",
            saved,
            inputs=len(parts),
            different=len(others),
        )


class PoolScales(LintCheck):
    """A max pool of a quantized tensor, quantized again with other parameters.

    A max pool returns values that it was given, so the parameters of its input fit its result.
    """

    code = "pool-scales"

    def find(self, graph: LintGraph) -> Iterator[LintFinding]:
        """Look at every pool whose result is quantized."""
        for node in graph.normal.graph.nodes:
            if not is_call(node, *_POOLS):
                continue
            after = _static_below(results_of(node).get(0, node))
            source = node_of(arguments(node)["self"])
            if after is None or not _differs(source, after):
                continue
            kind = op_name(node).removeprefix("aten.")
            yield self.finding(
                node,
                f"the input of this {kind} is quantized with {_text(source)}, and its result with "
                f"{scale_text(after.params)}",
                f"use the parameters of the input for the result of the {kind}",
                graph.pass_us(after.node, [8], [8]),
            )


class SharedEdge(LintCheck):
    """One float tensor that is quantized several times, with different static parameters."""

    code = "shared-edge"

    def find(self, graph: LintGraph) -> Iterator[LintFinding]:
        """Look at the quantizes that are direct users of every tensor."""
        for node in graph.normal.graph.nodes:
            quantizes = [
                op
                for user in node.users
                if (op := as_quantize(user)) is not None and op.x is node and static(op.params)
            ]
            if len(quantizes) < 2:  # noqa: PLR2004
                continue
            first, *rest = quantizes
            others = [op for op in rest if not _equal(first, op)]
            if not others:
                continue
            yield self.finding(
                others[0].node,
                f"the value of {op_name(node)} is quantized {len(others) + 1} times with "
                f"different parameters ({scale_text(first.params)}; "
                f"{scale_text(others[0].params)})",
                "quantize it once, and let all users read that",
                sum(graph.pass_us(op.node, [32], [8]) for op in others),
                times=len(others) + 1,
            )


def _equal(a: Quantize, b: Quantize) -> bool:
    return a.params.same_as(b.params) or same_numbers(a.params, b.params)


def _parts(node: Node) -> list[Node]:
    parts = arguments(node)["tensors"]
    assert isinstance(parts, (list, tuple)), "the operands of a join are a list"
    return [node_of(part) for part in parts]


def _static_below(node: Node) -> Quantize | None:
    """Return the static quantize of ``node`` with one scale, behind movements."""
    found = quantizes_below(node)
    if not found or not static(found[0].params):
        return None
    return found[0] if all(b is None for b in found[0].params.spec.block) else None


def _differs(part: Node, after: Quantize) -> bool:
    """Whether ``part`` is dequantized with one scale, and ``after`` has another one."""
    before = encoded(part)
    if before is None or not before.has_one_scale or not static(before.params):
        return False
    return not same_numbers(before.params, after.params)


def _text(part: Node) -> str:
    before = encoded(part)
    assert before is not None, "only quantized inputs differ"
    return scale_text(before.params)
