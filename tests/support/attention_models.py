"""What attention models share: quantization in source spellings, and compiling without C++."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

import qfuse
from qfuse.ir.events import Lowered
from qfuse.targets import Target

importlib.import_module("torch.ao.quantization.fx._decomposed")
decomposed = torch.ops.quantized_decomposed

KERNEL = "qfuse.matmul_a8a8"


def static(
    x: torch.Tensor, scale: float, zero: int = 0, dtype: torch.dtype = torch.int8
) -> torch.Tensor:
    """Quantize and dequantize as PT2E does."""
    info = torch.iinfo(dtype)
    settings = (scale, zero, info.min, info.max, dtype)
    q = decomposed.quantize_per_tensor(x, *settings)
    real: torch.Tensor = decomposed.dequantize_per_tensor(q, *settings)
    return real


def dynamic(x: torch.Tensor) -> torch.Tensor:
    """Quantize and dequantize with one scale that is chosen at run time, as PT2E does."""
    scale, zero = decomposed.choose_qparams(x, -128, 127, 1e-6, torch.int8)
    settings = (scale, zero, -128, 127, torch.int8)
    q = decomposed.quantize_per_tensor(x, *settings)
    real: torch.Tensor = decomposed.dequantize_per_tensor(q, *settings)
    return real


def per_row(x: torch.Tensor) -> torch.Tensor:
    """Quantize and dequantize with a scale of each row, by hand."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
    q = torch.clamp(torch.round(x / scale), -128, 127).to(torch.int8)
    return q.to(torch.float32) * scale


def compiled(model: nn.Module, args: tuple[torch.Tensor, ...], shapes: Any = None) -> Any:
    """Compile without C++, and check every site."""
    return qfuse.compile(
        model.eval(),
        args,
        dynamic_shapes=shapes,
        options={"backend": "eager"},
        check="site",
        target=Target.for_testing(),
    )


def products(fast: Any) -> list[Lowered]:
    """Return how the products were lowered."""
    return [e for e in fast.report.events if isinstance(e, Lowered) and " x " in e.what]


def kernels(fast: Any) -> list[str | None]:
    """Return the kernels of the products."""
    return [event.kernel for event in products(fast)]


def assert_close(model: nn.Module, fast: Any, args: tuple[torch.Tensor, ...]) -> None:
    """Check that a few quantized values differ by a step at most."""
    with torch.no_grad():
        want, got = model(*args), fast(*args)
    assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
    if not want.numel():
        return
    noise = (got - want).double().square().mean() / want.double().square().mean()
    assert noise < 1e-3, "30 dB: a few flipped codes, not another function"
