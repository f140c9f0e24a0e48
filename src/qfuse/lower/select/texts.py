"""The text of a product: everything that its time depends on, and nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from qfuse.cost import hint_of
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.views import QuantParams
from qfuse.ir.quant.spec import dtype_name
from qfuse.ir.sizes import is_row_major
from qfuse.lower.problems.product import ProductProblem, WeightedProblem


def product_text(problem: ProductProblem) -> str:
    """Describe a product at its traced sizes; products of equal texts are measured once."""
    fused: Any = problem.fused
    parts = [f"{one.name}={_text(getattr(fused, one.name))}" for one in fused.layout.fields]
    if isinstance(problem, WeightedProblem) and problem.in_float:
        parts.append("dequantized activation")
    return f"{type(fused).overload.name()}({', '.join(parts)})"


def _text(value: object) -> str:
    if isinstance(value, Node):
        return _tensor_text(value.meta["val"])
    if isinstance(value, QuantParams):
        when = "dynamic" if constant_of(value.scale) is None else "static"
        zero = "" if value.zero_point is None else " zero point"
        return f"<{value.spec} {when}{zero}>"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_text, value))}]"
    return str(value)


def _tensor_text(value: torch.Tensor) -> str:
    shape = [hint_of(size) for size in value.shape]
    # Kernels read other strides at other speeds.
    order = "" if is_row_major(value) else f" strides {[hint_of(s) for s in value.stride()]}"
    return f"{dtype_name(value.dtype)}{shape}{order}"
