"""Views of linears: ATen's, and the fused quantized op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.fx import Node

from qfuse.ir.aten import aten
from qfuse.ir.graph.schema import arguments, is_call
from qfuse.ir.ops.declare import Op, define_op
from qfuse.ir.ops.epilogue import Epilogue
from qfuse.ir.ops.views import QuantParams, node_of, optional_node


@dataclass(frozen=True, slots=True)
class Linear:
    """An ``aten.linear`` call: ``x @ weight.T + bias``."""

    node: Node
    x: Node
    weight: Node
    bias: Node | None


@define_op("linear")
@dataclass(frozen=True, slots=True)
class FusedLinear(Op):
    """A ``qfuse::linear`` call. Operands without quantization parameters are float."""

    x: Node
    x_params: QuantParams | None
    weight: Node
    weight_params: QuantParams | None
    bias: Node | None
    out_params: QuantParams | None
    epilogue: Epilogue
    extras: tuple[Node, ...]

    @staticmethod
    def reference(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        epilogue: Epilogue,
        extras: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Multiply, add the bias, and apply the epilogue."""
        return epilogue.apply(F.linear(x, weight, bias), extras)


def as_linear(value: object) -> Linear | None:
    """View ``value`` as an ``aten.linear``, or ``None``."""
    if not isinstance(value, Node) or not is_call(value, aten.linear.default):
        return None
    a = arguments(value)
    return Linear(value, node_of(a["input"]), node_of(a["weight"]), optional_node(a["bias"]))


as_fused_linear = FusedLinear.of
