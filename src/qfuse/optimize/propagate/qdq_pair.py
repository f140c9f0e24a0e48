"""A Q/DQ pair, a quantize of a dequantize, which two rules match."""

from __future__ import annotations

from qfuse.ir.ops.qdq import Dequantize, Quantize, as_dequantize, as_quantize
from qfuse.rewrite.prelude import Miss, MissCode, Node


def quantize_pair(node: Node) -> tuple[Quantize, Dequantize] | Miss:
    """View ``node``, a quantize, with the dequantize that is its operand; miss if there is none."""
    quantize = as_quantize(node)
    assert quantize is not None, "the anchor is a quantize"
    dequantize = as_dequantize(quantize.x)
    if dequantize is None:
        return Miss(MissCode.PATTERN, node, "its operand is not a dequantize", progress=0)
    return quantize, dequantize
