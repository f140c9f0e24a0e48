"""Run a graph with sums and functions whose bits do not depend on what is computed beside them.

A library sums the products of a wider matrix in another order, and computes a function of a vector
by another formula than that of the numbers that are left at its end. Its bits say nothing about a
rewrite that only moves, merges or splits. Here the bits of such a rewrite must be the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.fx import Interpreter

from qfuse.ir import ops
from qfuse.ir.epilogue import Epilogue
from qfuse.ir.quant_math import dequantize, quantize
from qfuse.ir.quant_spec import QuantSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.fx import Node

    from qfuse.ir.program import StageGraph

__all__ = ["run_fixed_order"]


_aten = torch.ops.aten

_FUNCTIONS = frozenset(
    (
        *(_aten.silu.default, _aten.sigmoid.default, _aten.tanh.default, _aten.gelu.default),
        *(_aten.exp.default, _aten.erf.default, _aten.sin.default, _aten.cos.default),
        *(_aten.pow.Tensor_Scalar, _aten.rsqrt.default, _aten.hardswish.default),
    )
)
"""Functions that a library computes by several formulas."""

# More than any vector has; far less than what is computed on several threads.
_VECTOR = 64
_CHUNK = 1 << 14


def run_fixed_order(
    program: StageGraph, inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return the flat outputs.

    Every linear, fused or not, adds its products one after the other, and every function of numbers
    is computed in whole vectors.

    Args:
        program: A graph before it is lowered.
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
        if n.target is ops.linear:
            return _fused(*self.fetch_args_kwargs_from_env(n)[0])
        if n.target in _FUNCTIONS:
            (x, *rest), kwargs = self.fetch_args_kwargs_from_env(n)
            # For its strides; its numbers are replaced.
            op: Any = n.target
            y = op(x, *rest, **kwargs)
            return y.copy_(_in_vectors(lambda v: op(v, *rest, **kwargs), x))
        return super().run_node(n)


def _in_vectors(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Apply a function of one number to all, in vectors that none is left of."""
    flat = x.reshape(-1)
    padded = F.pad(flat, (0, -len(flat) % _VECTOR))
    chunks = [function(chunk) for chunk in torch.split(padded, _CHUNK)]
    return torch.cat(chunks)[: len(flat)].reshape(x.shape)


def _fused(*args: Any) -> torch.Tensor:
    """The meaning of ``qfuse::linear``, with another sum; its arguments in the schema's order."""
    x, weight = _edge(*args[0:4]), _edge(*args[4:8])
    y = Epilogue.parse(args[12]).apply(_linear(x, weight, args[8]), args[13])
    scale, zero_point, spec = args[9:12]
    return quantize(y, scale, zero_point, QuantSpec.parse(spec)) if spec else y


def _edge(
    value: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, spec: str
) -> torch.Tensor:
    return dequantize(value, scale, zero_point, QuantSpec.parse(spec)) if spec else value


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    y = torch.zeros((*x.shape[:-1], weight.shape[0]), dtype=x.dtype)
    for index in range(x.shape[-1]):
        y += x[..., index, None] * weight[:, index]
    return y if bias is None else y + bias
