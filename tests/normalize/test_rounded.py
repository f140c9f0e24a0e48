"""Fake quantization that is written out is named, whatever the order of its ops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from qfuse.capture import capture
from qfuse.ir.events import MissCode, Missed
from qfuse.normalize import normalize

Forward = Callable[[torch.Tensor], torch.Tensor]


class Model(nn.Module):
    """A model of one function."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self._forward = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(x)


def named(forward: Forward) -> list[str]:
    """Return the ops at which a missing cast is reported."""
    normal = normalize(capture(Model(forward), (torch.randn(4, 8),)))
    misses = [m for m in normal.log.of(Missed) if "stay in float32" in m.reason]
    assert all((m.rule, m.code) == ("quantize-chain", MissCode.DTYPE) for m in misses)
    return [m.at.op for m in misses]


@pytest.mark.parametrize(
    ("forward", "ops"),
    [
        (lambda x: (x / 0.1).round().clamp(-128, 127) * 0.1, ["aten.clamp"]),
        (lambda x: (x * 10).clamp(-8, 7).round() / 10, ["aten.round"]),
        (lambda x: (((x / 0.1).round() + 3).clamp(0, 255) - 3) * 0.1, ["aten.clamp"]),
        (lambda x: ((x / 0.1 + 3).round().clamp(0, 255) - 3) * 0.1, ["aten.clamp"]),
        # Quantization that is recognized, and arithmetic that quantizes nothing.
        (lambda x: (x / 0.1).round().clamp(-128, 127).to(torch.int8).float() * 0.1, []),
        (lambda x: (x / 0.1).round().clamp(-0.5, 0.5) * 0.1, []),
        (lambda x: (x / 0.1).clamp(-128, 127) * 0.1, []),
        (lambda x: x.round().clamp(-128, 127) * 0.1, []),
        (lambda x: x.chunk(2)[0].round().clamp(-128, 127) * 0.1, []),
        (lambda x: x.max(-1).values.clamp(-128, 127) * 0.1 * x.max(-1).values, []),
    ],
)
def test_rounded_values_that_stay_in_float_are_named(forward: Forward, ops: list[str]) -> None:
    assert named(forward) == ops


WEIGHT = torch.randint(-127, 128, (5, 8), dtype=torch.int8)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Round in units of a scale, without a cast."""
    return (x / 0.1).round().clamp(-128, 127)


@pytest.mark.parametrize(
    ("forward", "ops"),
    [
        (lambda x: nn.functional.linear(rounded(x), WEIGHT.float()) * 0.01, ["aten.clamp"]),
        (lambda x: rounded(x) @ rounded(x).T * 0.01, ["aten.clamp"] * 2),
        # One chain that is read twice has one name.
        (
            lambda x: (
                nn.functional.linear(y := rounded(x), WEIGHT.float() * 0.1),
                nn.functional.linear(y, WEIGHT.float() * 0.2),
            ),
            ["aten.clamp"],
        ),
        # Rounding before a float weight may be part of the model.
        (lambda x: nn.functional.linear(rounded(x), torch.ones(5, 8)) * 0.01, []),
    ],
)
def test_rounded_values_whose_product_is_scaled_are_named(forward: Forward, ops: list[str]) -> None:
    assert named(forward) == ops
