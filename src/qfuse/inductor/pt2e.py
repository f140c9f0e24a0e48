"""The PT2E ops that remain after decompositions: static Q/DQ with Python numbers.

They are matched by name, since torch registers them only when PT2E is imported.
"""

from __future__ import annotations

import torch

from qfuse.ir.graph.schema import overload_of
from qfuse.ir.ops.views import dtype_of
from qfuse.rewrite.prelude import Node, arguments

QUANTIZE = "quantized_decomposed::quantize_per_tensor"
DEQUANTIZE = "quantized_decomposed::dequantize_per_tensor"


def is_quantization(node: object, name: str) -> bool:
    """Whether a node is a float32 call with Python numbers as scale and zero point."""
    op = overload_of(node) if isinstance(node, Node) else None
    if op is None or op._schema.name != name or op._overloadname != "default":  # noqa: SLF001
        return False
    assert isinstance(node, Node), "it calls an op"
    # In bfloat16 the float value between the two is rounded, so a round trip is not exact.
    real = node if name == DEQUANTIZE else arguments(node)["input"]
    return isinstance(real, Node) and dtype_of(real) is torch.float32
