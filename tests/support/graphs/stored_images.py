"""Parts of hand-written networks whose images and weights are quantized as PT2E does."""

from __future__ import annotations

import importlib

import torch
from torch import nn

import qfuse
from qfuse.targets import Target

# The ops of PT2E exist once this is imported.
importlib.import_module("torch.ao.quantization.fx._decomposed")
pt2e = torch.ops.quantized_decomposed


def stored(
    x: torch.Tensor, scale: float, zero: int = 3, dtype: torch.dtype = torch.int8
) -> torch.Tensor:
    """Quantize and dequantize with one scale."""
    info = torch.iinfo(dtype)
    params = (scale, zero, info.min, info.max, dtype)
    made: torch.Tensor = pt2e.dequantize_per_tensor(pt2e.quantize_per_tensor(x, *params), *params)
    return made


class Weight(nn.Module):
    """An int8 weight with one scale per index of its first axis."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.register_buffer("q", torch.randint(-128, 128, shape).to(torch.int8))
        self.register_buffer("scale", torch.rand(shape[0]) * 0.02 + 0.003)
        self.register_buffer("zero", torch.zeros(shape[0], dtype=torch.int64))

    def forward(self) -> torch.Tensor:
        """Return the floats."""
        args = (self.q, self.scale, self.zero, 0, -128, 127, torch.int8)
        made: torch.Tensor = pt2e.dequantize_per_channel(*args)
        return made


def compiled(
    model: nn.Module, x: torch.Tensor, *others: torch.Tensor, dynamic_shapes: object = None
) -> qfuse.CompiledModel:
    """Compile without a backend, and compare with the source on other images."""
    fast = qfuse.compile(
        model.eval(),
        (x,),
        dynamic_shapes=dynamic_shapes,
        target=Target.for_testing(),
        check="site",
        options={"backend": "eager"},
    )
    assert fast.report.rolled_back == ()
    assert all(check.passed for check in fast.report.checks)
    for other in others or (torch.randn_like(x),):
        with torch.no_grad():
            expected, made = model(other), fast(other)
        assert (made.shape, made.dtype) == (expected.shape, expected.dtype)
        # A value next to a tie may be a step off, and all that is computed from it.
        assert (made - expected).abs().mean() <= 1e-2 * expected.abs().mean()
    return fast


def called(fast: qfuse.CompiledModel) -> list[str]:
    """Return the names of the ops of the lowered graph."""
    nodes = fast.plan.lowered.graph.nodes
    return [str(n.target) for n in nodes if n.op == "call_function"]


def dtypes_of(fast: qfuse.CompiledModel, op: object) -> list[torch.dtype]:
    """Return the dtypes of the results of an op."""
    return [n.meta["val"].dtype for n in fast.plan.lowered.graph.nodes if n.target is op]
