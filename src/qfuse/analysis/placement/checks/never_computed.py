"""A tensor that is quantized, and read in float only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.fx import Node

from qfuse.analysis.placement.check import LintCheck
from qfuse.analysis.placement.finding import LintFinding, Severity
from qfuse.analysis.placement.graph import LintGraph
from qfuse.analysis.placement.operands import source_of
from qfuse.ir.dtypes import bit_width
from qfuse.ir.graph.stage_graph import constant_of, op_name
from qfuse.ir.ops.library import stored_spec
from qfuse.ir.ops.qdq import as_dequantize, as_quantize
from qfuse.ir.ops.views import dtype_of, result_of


class NeverComputed(LintCheck):
    """A quantize whose result is only dequantized for float ops, also after all fusions.

    It rounds values and costs passes over them, and no op computes on the quantized values. It is
    information where another op quantizes its result, which takes no time.
    """

    code = "never-computed-on"

    def find(self, graph: LintGraph) -> Iterator[LintFinding]:
        """Look at what the optimized graph still quantizes, alone or as part of another op."""
        for node in graph.optimized.graph.nodes:
            source = _quantized(node)
            reads = None if source is None else _float_users(node)
            if source is None or reads is None:
                continue
            names = list(dict.fromkeys(map(_name, reads)))
            shown = ", ".join(names[:3])
            result = result_of(node)
            found = self.finding(
                node if result is None else result[0],
                f"the result of {_name(source)} is quantized and dequantized again, and only "
                f"{shown} {'read' if len(names) > 1 else 'reads'} it, in float",
                "leave this tensor in float",
                _cost(graph, node),
                readers=shown,
            )
            # As part of another op it costs no time, and writes fewer bytes.
            free = as_quantize(node) is None
            yield replace(found, severity=Severity.INFO) if free else found


def _quantized(node: Node) -> Node | None:
    """Return the op whose float result ``node`` is the quantized form of, or ``None``."""
    quantize = as_quantize(node)
    if quantize is not None:
        return None if constant_of(quantize.x) is not None else quantize.x
    is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
    return node if is_tensor and stored_spec(node) is not None else None


def _cost(graph: LintGraph, node: Node) -> float:
    """Return the cost of a quantize that is an op of its own; as part of a kernel it has none."""
    quantize = as_quantize(node)
    if quantize is None:
        return 0.0
    bits = bit_width(dtype_of(quantize.x))
    return graph.pass_us(node, [bits], [8]) + graph.pass_us(node, [8], [bits], calls=False)


def _float_users(node: Node) -> list[Node] | None:
    """Return the ops that read ``node`` after a dequantize; ``None`` if anything else reads it."""
    found: list[Node] = []
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if as_dequantize(user) is not None:
                found += user.users
            elif source_of(user) is not None:
                stack.append(user)
            else:
                return None
    return found or None


def _name(user: Node) -> str:
    if user.op == "output":
        return "the caller of the model"
    result = result_of(user)
    return op_name(user if result is None else result[0])
