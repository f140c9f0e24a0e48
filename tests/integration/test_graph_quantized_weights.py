"""Weights that the graph itself quantizes, or scales after the product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # the ops of PT2E
from tests.support.graphs.tiny_models import sqnr
from torch import nn
from torch.nn import functional as F

import qfuse
from qfuse.targets import Target

q_d = torch.ops.quantized_decomposed

pytestmark = [pytest.mark.numeric, pytest.mark.own_kernels]


class Layer(nn.Module):
    """A layer with a float weight, its int8 values and one scale per output channel."""

    def __init__(self, shape: tuple[int, ...], forward: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        weight = torch.randn(shape)
        scale = weight.abs().amax(tuple(range(1, len(shape)))) / 127
        column = scale.view(-1, *[1] * (len(shape) - 1))
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("zero", torch.zeros_like(scale, dtype=torch.int64))
        self.register_buffer("q", (weight / column).round().to(torch.int8))
        self.compute = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(self, x)

    def quantized(self) -> torch.Tensor:
        """Quantize and dequantize the weight."""
        params = (self.scale, self.zero, 0, -127, 127, torch.int8)
        q = q_d.quantize_per_channel(self.weight, *params)
        x: torch.Tensor = q_d.dequantize_per_channel(q, *params)
        return x


def static(x: torch.Tensor) -> torch.Tensor:
    """Quantize and dequantize an activation."""
    params = (0.03, 120, 0, 255, torch.uint8)
    y: torch.Tensor = q_d.dequantize_per_tensor(q_d.quantize_per_tensor(x, *params), *params)
    return y


CONV, LINEAR = (16, 8, 3, 3), (16, 8)
PIXELS, ROWS = (2, 8, 7, 9), (5, 8)


@pytest.mark.parametrize(
    ("shape", "x", "forward", "kernel"),
    [
        (CONV, PIXELS, lambda m, x: F.conv2d(static(x), m.quantized()), "convolution_w8a8"),
        (CONV, PIXELS, lambda m, x: F.conv2d(x, m.quantized()), "convolution_w8a16"),
        (LINEAR, ROWS, lambda m, x: F.linear(static(x), m.quantized()), "linear_w8a8"),
        (
            CONV,
            PIXELS,
            lambda m, x: F.conv2d(x, m.q.float()) * m.scale.view(1, -1, 1, 1),
            "convolution_w8a16",
        ),
        (
            CONV,
            PIXELS,
            lambda m, x: F.conv2d(static(x), m.q.float()) * m.scale.view(-1, 1, 1),
            "convolution_w8a8",
        ),
    ],
    ids=[
        "quantized convolution",
        "weight-only convolution",
        "quantized linear",
        "weight-only convolution, scaled after",
        "quantized convolution, scaled after",
    ],
)
def test_it_runs_on_quantized_values(
    shape: tuple[int, ...],
    x: tuple[int, ...],
    forward: Callable[..., torch.Tensor],
    kernel: str,
) -> None:
    model, example = Layer(shape, forward).eval(), torch.randn(x)
    target = Target.for_testing()
    fast = qfuse.compile(
        model, (example,), target=target, check="site", options={"backend": "eager"}
    )

    assert fast.report.kernels == {f"qfuse.{kernel}": 1}
    assert fast.report.rolled_back == ()
    assert sqnr(model(example), fast(example)) > 100


def test_fake_quantize_with_computed_parameters_is_named() -> None:
    def forward(_: Layer, x: torch.Tensor) -> torch.Tensor:
        scale, zero_point = x.abs().amax().reshape(1) / 127, torch.zeros(1, dtype=torch.int32)
        return torch.fake_quantize_per_tensor_affine(x, scale, zero_point, -128, 127)

    model = Layer(CONV, forward).eval()
    fast = qfuse.compile(model, (torch.randn(PIXELS),), options={"backend": "eager"})

    (note,) = [note.text for note in fast.report.notes if "fake_quantize" in note.text]
    assert "rounds in float: convert the model" in note


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_a_reference_model_of_fx_graph_mode_is_quantized() -> None:
    from torch.ao.quantization import get_default_qconfig_mapping  # noqa: PLC0415
    from torch.ao.quantization import quantize_fx as fx  # noqa: PLC0415

    x = torch.randn(2, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()
    prepared: Any = fx.prepare_fx(model, get_default_qconfig_mapping("x86"), (x,))
    prepared(x)
    source = fx._convert_to_reference_decomposed_fx(prepared)
    target = Target.for_testing()
    fast = qfuse.compile(source, (x,), target=target, check="site", options={"backend": "eager"})

    assert fast.report.kernels == {"qfuse.convolution_w8a8": 1, "qfuse.linear_w8a8": 1}
    assert sqnr(source(x), fast(x)) > 60
