"""Run a graph with bitwise reproducible sums and functions, independent of the tensor sizes.

A library sums the products of a wider matrix in another order, and uses other formulas for whole
vectors than for their tails. So its bits cannot check a rewrite that only moves, merges or splits.
Here such a rewrite must be bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Interpreter, Node

from qfuse.ir.aten import aten
from qfuse.ir.graph.stage_graph import StageGraph
from qfuse.ir.ops.convolution import Convolution, FusedConvolution, as_convolution
from qfuse.ir.ops.declare import Op
from qfuse.ir.ops.epilogue import Act, Epilogue
from qfuse.ir.ops.linear import FusedLinear
from qfuse.testing.fixed_convolution import WindowSettings, sequential_convolution

_FUNCTIONS = frozenset(
    (
        *(aten.silu.default, aten.sigmoid.default, aten.tanh.default, aten.gelu.default),
        *(aten.exp.default, aten.erf.default, aten.sin.default, aten.cos.default),
        *(aten.pow.Tensor_Scalar, aten.rsqrt.default, aten.hardswish.default),
        *(aten.elu.default, aten.mish.default, aten.log.default, aten.softplus.default),
    )
)
"""Functions for which libraries use several formulas."""

# More elements than any vector; far fewer than what is split over threads.
_VECTOR = 64
_CHUNK = 1 << 14


def run_fixed_order(
    program: StageGraph, inputs: Sequence[torch.Tensor], *, dense: bool = False
) -> tuple[torch.Tensor, ...]:
    """Return the flat outputs.

    Every linear and convolution, fused or not, adds its products sequentially; every elementwise
    function is computed in whole vectors.

    Args:
        program: A graph before it is lowered.
        inputs: One tensor per placeholder.
        dense: Whether every value is made contiguous, since a library may round an exponential
            differently for strided elements.
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
        conv = as_convolution(n)
        if conv is not None:
            bias = None if conv.bias is None else self.env[conv.bias]
            return _convolution(self.env[conv.x], self.env[conv.weight], bias, conv)
        fused = _FUSED.get(n.target)
        if fused is not None:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            return fused[0].compute(fused[1], *args, **kwargs)
        if n.target in _FUNCTIONS:
            (x, *rest), kwargs = self.fetch_args_kwargs_from_env(n)
            # Only for its strides; its values are replaced.
            op: Any = n.target
            y = op(x, *rest, **kwargs)
            return y.copy_(_in_vectors(lambda v: op(v, *rest, **kwargs), x))
        return super().run_node(n)


def _in_vectors(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Apply an elementwise function, padded to whole vectors."""
    flat = x.reshape(-1)
    padded = F.pad(flat, (0, -len(flat) % _VECTOR))
    chunks = [function(chunk) for chunk in torch.split(padded, _CHUNK)]
    return torch.cat(chunks)[: len(flat)].reshape(x.shape)


def _float_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epilogue: Epilogue,
    extras: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Compute ``qfuse::linear`` in float, with sequential sums."""
    return _epilogue(_linear(x, weight, bias), epilogue, extras)


def _epilogue(y: torch.Tensor, epilogue: Epilogue, extras: Sequence[torch.Tensor]) -> torch.Tensor:
    """Apply the epilogue ops, activations in whole vectors."""
    for op in epilogue.ops:
        one = Epilogue((op,))
        if isinstance(op, Act):
            y = _in_vectors(partial(one.apply, extras=extras), y)
        else:
            y = one.apply(y, extras)
    return y


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    y = torch.zeros((*x.shape[:-1], weight.shape[0]), dtype=x.dtype)
    for index in range(x.shape[-1]):
        y += x[..., index, None] * weight[:, index]
    return y if bias is None else y + bias


def _biased(y: torch.Tensor, bias: torch.Tensor | None, axis: int) -> torch.Tensor:
    return y if bias is None else (y.movedim(axis, -1) + bias).movedim(-1, axis).contiguous()


def _convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, conv: Convolution
) -> torch.Tensor:
    """Compute a convolution as a linear over its windows."""
    groups = conv.groups
    assert isinstance(groups, int), "the number of groups is known"
    late = conv.per_axis("output_padding") if conv.transposed else ()
    padding = _padding(conv, weight.shape[2:])
    stride, dilation = conv.per_axis("stride"), conv.per_axis("dilation")
    settings = WindowSettings(stride, padding, dilation, groups, conv.transposed, late)
    return _biased(sequential_convolution(x, weight, settings, _linear), bias, conv.axis)


def _float_convolution(  # noqa: PLR0913, PLR0917 - its arguments are the op's fields
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    transposed: bool,
    output_padding: tuple[int, ...],
    groups: int,
    epilogue: Epilogue,
    extras: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Compute ``qfuse::convolution`` in float, with sequential sums."""
    pairs = tuple(zip(padding[: len(stride)], padding[-len(stride) :], strict=True))
    settings = WindowSettings(stride, pairs, dilation, groups, transposed, output_padding)
    y = sequential_convolution(x, weight, settings, _linear)
    return _epilogue(_biased(y, bias, x.dim() - len(stride) - 1), epilogue, extras)


def _padding(conv: Convolution, kernel: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the padding before and after every axis."""
    given = conv.settings["padding"]
    if not isinstance(given, str):
        return tuple((amount, amount) for amount in conv.per_axis("padding"))
    sizes = zip(kernel, conv.per_axis("dilation"), strict=True)
    whole = [(given == "same") * step * (size - 1) for size, step in sizes]
    return tuple((amount // 2, amount - amount // 2) for amount in whole)


_FUSED: dict[object, tuple[type[Op], Callable[..., torch.Tensor]]] = {
    FusedLinear.overload: (FusedLinear, _float_linear),
    FusedConvolution.overload: (FusedConvolution, _float_convolution),
}
