"""Run a graph with linears whose sums are in an order that depends on their length only.

A library sums the products of a wider matrix in another order, so that its bits say nothing about
a rewrite that only moves or merges linears. Here the bits of such a rewrite must be the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Interpreter

from qfuse.ir import ops
from qfuse.ir.epilogue import Epilogue
from qfuse.ir.quant_math import dequantize, quantize
from qfuse.ir.quant_spec import QuantSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import GraphModule, Node

    from qfuse.ir.program import StageGraph

__all__ = ["run_fixed_order"]


def run_fixed_order(
    program: StageGraph, inputs: Sequence[torch.Tensor], *, dense: bool = False
) -> tuple[torch.Tensor, ...]:
    """Return the flat outputs; every linear, fused or not, adds its products one after the other.

    Args:
        program: A graph before it is lowered.
        inputs: One tensor per placeholder.
        dense: Whether every value is made contiguous: a library rounds an exponential in another
            way where it does not find its elements side by side.
    """
    with torch.no_grad():
        outputs: tuple[torch.Tensor, ...] = _FixedOrder(program.module, dense).run(*inputs)
    return outputs


class _FixedOrder(Interpreter):
    def __init__(self, module: GraphModule, dense: bool) -> None:
        super().__init__(module)
        self._dense = dense

    def run_node(self, n: Node) -> Any:
        made = self._value(n)
        return made.contiguous() if self._dense and isinstance(made, torch.Tensor) else made

    def _value(self, n: Node) -> Any:
        if n.target is torch.ops.aten.linear.default:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            return _linear(*args, **kwargs)
        if n.target is ops.linear:
            return _fused(*self.fetch_args_kwargs_from_env(n)[0])
        return super().run_node(n)


def _fused(*args: Any) -> torch.Tensor:
    """The meaning of ``qfuse::linear``, with another sum; its arguments in the schema's order."""
    outer = [*args[14:], None, None, None]
    x = _edge(args[0], args[1], args[2], args[3], outer[0])
    weight = _edge(args[4], args[5], args[6], args[7], outer[1])
    y = Epilogue.parse(args[12]).apply(_linear(x, weight, args[8]), args[13])
    scale, zero_point, spec = args[9:12]
    return quantize(y, scale, zero_point, QuantSpec.parse(spec), outer[2]) if spec else y


def _edge(
    value: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    spec: str,
    outer_scale: torch.Tensor | None,
) -> torch.Tensor:
    if not spec:
        return value
    return dequantize(value, scale, zero_point, QuantSpec.parse(spec), outer_scale)


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    y = torch.zeros((*x.shape[:-1], weight.shape[0]), dtype=x.dtype)
    for index in range(x.shape[-1]):
        y += x[..., index, None] * weight[:, index]
    return y if bias is None else y + bias
