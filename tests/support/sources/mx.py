"""Modules that compute as torchao's MX tensors do, traced as an exported graph holds them."""

from __future__ import annotations

import torch
from tests.support.sources.dialects import equal_but_for_nan, run
from torch import nn

from qfuse.capture.capture import capture
from qfuse.ir.graph.text import to_text
from qfuse.normalize import normalize
from qfuse.zoo._torchao_api import quiet_imports

with quiet_imports():
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

from collections.abc import Callable

from qfuse.ir.graph.stage_graph import CapturedGraph, NormalGraph

MODES = ["floor", "ceil", "rceil"]


class Scales(nn.Module):
    """The block scales of a tensor, as bytes."""

    def __init__(
        self, mode: str, dtype: torch.dtype = torch.float8_e4m3fn, block: int = 32
    ) -> None:
        super().__init__()
        self.mode, self.dtype, self.block = ScaleCalculationMode(mode), dtype, block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale, _ = to_mx(x, self.dtype, self.block, self.mode)
        numbers: torch.Tensor = scale.to(torch.float32)
        return numbers


class Quantizes(Scales):
    """The quantized values of a tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, q = to_mx(x, self.dtype, self.block, self.mode)
        numbers: torch.Tensor = q.to(torch.float32)
        return numbers


class Dequantizes(nn.Module):
    """The real numbers that are stored in blocks."""

    def __init__(self, float_dtype: torch.dtype, block: int = 32) -> None:
        super().__init__()
        self.float_dtype, self.block = float_dtype, block

    def forward(self, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        real: torch.Tensor = to_dtype(q, scale, q.dtype, self.block, self.float_dtype)
        return real


def hard(float_dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Numbers of all magnitudes, some of which are zero, infinite or not a number."""
    x = torch.randn(shape) * 2.0 ** torch.randint(-140, 125, (*shape[:-1], 1))
    some = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan, 448.0, 500.0])
    x.view(-1)[: len(some)] = some
    return x.to(float_dtype)


def captured(module: nn.Module, *inputs: torch.Tensor, **options: object) -> CapturedGraph:
    """Capture a module."""
    return capture(module.eval(), inputs, **options)  # type: ignore[arg-type]


def normalized(
    module: nn.Module, *inputs: torch.Tensor, edit: Callable[[CapturedGraph], None] | None = None
) -> NormalGraph:
    """Normalize a module, and assert that its result keeps its bits."""
    program = captured(module, *inputs)
    if edit is not None:
        edit(program)
    text = to_text(program.graph)
    (before,) = run(program, list(inputs))
    normal = normalize(program)
    (after,) = run(normal, list(inputs))
    assert before.dtype == after.dtype
    assert equal_but_for_nan(before, after), f"{text}\n-->\n{to_text(normal.graph)}"
    return normal
