"""Quantization in PT2E's spelling moves, is combined and cancels inside Inductor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed
from tests.inductor.frozen import freeze
from torch import nn

ops = torch.ops.quantized_decomposed
PARAMS = (0.05, 3, -128, 127, torch.int8)


class Movement(nn.Module):
    """A value that was dequantized is viewed and quantized again, by two readers."""

    def __init__(self, *again: Any) -> None:
        super().__init__()
        self.again = again or PARAMS

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q = ops.quantize_per_tensor(x.sin(), *PARAMS)
        real = ops.dequantize_per_tensor(q, *PARAMS)
        outs: list[torch.Tensor] = []
        for _ in range(2):
            moved = real.view(-1, 4).permute(1, 0)
            stored = ops.quantize_per_tensor(moved, *self.again)
            outs.append(ops.dequantize_per_tensor(stored, *self.again).relu() + len(outs))
        return tuple(outs)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_quantize_of_a_dequantize_behind_views_goes_away(*, frozen: bool) -> None:
    x = torch.randn(3, 8) * 10
    found = freeze(Movement(), x, freezing=frozen)
    assert found.report.fired["cancel-quantize"] >= 1
    assert found.report.fired["lift-quantize"] >= 1
    assert found.calls(ops.quantize_per_tensor.default) == 1
    for plain, merged in zip(found.plain, found.merged, strict=True):
        assert torch.equal(plain, merged)


@pytest.mark.parametrize(
    "again",
    [
        (0.04, 3, -128, 127, torch.int8),
        (0.05, 2, -128, 127, torch.int8),
        (0.05, 3, 0, 127, torch.int8),
        (0.05, 3, 0, 255, torch.uint8),
    ],
)
def test_other_parameters_stay(again: tuple[Any, ...]) -> None:
    x = torch.randn(3, 8) * 10
    found = freeze(Movement(*again), x)
    assert not found.report.fired["cancel-quantize"]
    assert found.calls(ops.quantize_per_tensor.default) == 2
    for plain, merged in zip(found.plain, found.merged, strict=True):
        assert torch.equal(plain, merged)
