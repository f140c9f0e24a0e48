"""Run a graph with linears whose sums are in an order that depends on their length only.

A library sums the products of a wider matrix in another order, so that its bits say nothing about
a rewrite that only moves or merges linears. Here the bits of such a rewrite must be the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Interpreter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Node

    from qfuse.ir.program import StageGraph

__all__ = ["run_fixed_order"]


def run_fixed_order(
    program: StageGraph, inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return the flat outputs; every ``aten.linear`` adds its products from the first to the last.

    Args:
        program: A graph before fused ops exist.
        inputs: One tensor per placeholder.
    """
    with torch.no_grad():
        outputs: tuple[torch.Tensor, ...] = _FixedOrder(program.module).run(*inputs)
    return outputs


class _FixedOrder(Interpreter):
    def run_node(self, n: Node) -> Any:
        if n.target is torch.ops.aten.linear.default:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            return _linear(*args, **kwargs)
        return super().run_node(n)


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    y = torch.zeros((*x.shape[:-1], weight.shape[0]), dtype=x.dtype)
    for index in range(x.shape[-1]):
        y += x[..., index, None] * weight[:, index]
    return y if bias is None else y + bias
