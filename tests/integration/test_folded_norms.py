"""Batch norms that a converter left behind quantized convolutions."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from tests.support.graphs.tiny_models import sqnr
from torch import nn

import qfuse
from qfuse.targets import Target

importlib.import_module("torch.ao.quantization.fx._decomposed")
quantized = torch.ops.quantized_decomposed
LEAST = 60.0


class Block(nn.Module):
    """A convolution of quantized operands, a batch norm with factors of both signs, a silu."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", torch.randint(-127, 128, (16, 8, 3, 3), dtype=torch.int8))
        self.register_buffer("w_scale", torch.rand(16) * 0.01 + 1e-3)
        self.register_buffer("w_zero", torch.zeros(16, dtype=torch.int32))
        self.norm = nn.BatchNorm2d(16)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)
        nn.init.normal_(self.norm.running_mean)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bounds = (0, 255, torch.uint8)
        x = quantized.quantize_per_tensor(x, 0.03, 120, *bounds)
        x = quantized.dequantize_per_tensor(x, 0.03, 120, *bounds)
        per_channel = (self.w_scale, self.w_zero, 0, -127, 127, torch.int8)
        w = quantized.dequantize_per_channel(self.w, *per_channel)
        y = self.norm(F.conv2d(x, w, padding=1)) * 0.7
        y = y * torch.sigmoid(y)
        y = quantized.quantize_per_tensor(y, 0.02, 10, *bounds)
        y = quantized.dequantize_per_tensor(y, 0.02, 10, *bounds)
        assert isinstance(y, torch.Tensor)
        return y


@pytest.mark.numeric
@pytest.mark.own_kernels
def test_norm_factor_and_activation_are_in_the_kernel() -> None:
    model, x = Block().eval(), torch.randn(2, 8, 9, 7)
    fast = qfuse.compile(
        model, (x,), target=Target.for_testing(), check="site", options={"backend": "eager"}
    )

    assert fast.report.rolled_back == ()
    fired = fast.report.fired
    assert {fired[name] for name in ("fold-batch-norm", "fold-scale", "spell-activation")} == {1}
    assert fired["fuse-output-quantize"] == 1
    with torch.no_grad():
        assert sqnr(model(x), fast(x)) > LEAST
