from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import assert_same_values, aten, finish, golden, refusal
from torch import nn

import qfuse
from qfuse.ir.events import MissCode
from qfuse.normalize.aten.qdq.fake_quantize import ImportFakeQuantize
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder

PER_TENSOR = aten.fake_quantize_per_tensor_affine
PER_CHANNEL = aten.fake_quantize_per_channel_affine.default


def test_golden_a_channel_and_a_tensor() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, 3)
    scale = b.const("s", torch.tensor([0.1, 0.2, 0.3]))
    zero = b.const("z", torch.tensor([0, 3, -4], dtype=torch.int32))
    y = b.call(PER_CHANNEL, x, scale, zero, 1, -127, 127)
    assert_expected_inline(
        golden(finish(b, b.call(PER_TENSOR.default, y, 0.1, 0, 0, 255)), ImportFakeQuantize()),
        """\
%x: float32[2, 3]
const %s_scale: float32[1, 3]
const %z_zero_point: int32[1, 3]
%0 = qfuse.quantize(%x, %s_scale, %z_zero_point, 'int8[-127,127] *x1 float32 float32:reciprocal:round-zp int'): int8[2, 3]
%1 = qfuse.dequantize(%0, %s_scale, %z_zero_point, 'int8[-127,127] *x1 float32 float32:reciprocal:round-zp int'): float32[2, 3]
const %fake_quantize_per_tensor_affine_default_scale: float32[1, 1]
%2 = qfuse.quantize(%1, %fake_quantize_per_tensor_affine_default_scale, None, 'uint8[0,255] *x* float32 float32:reciprocal:round-zp int'): uint8[2, 3]
%3 = qfuse.dequantize(%2, %fake_quantize_per_tensor_affine_default_scale, None, 'uint8[0,255] *x* float32 float32:reciprocal:round-zp int'): float32[2, 3]
return (%3)
fired: import-fake-quantize 2""",
    )


@pytest.mark.parametrize(
    ("scale", "zero", "bounds", "code"),
    [
        (0.0, 0, (-128, 127), MissCode.RANGE),
        (math.nan, 0, (-128, 127), MissCode.RANGE),
        (0.1, 0, (-128, 200), MissCode.RANGE),
        (0.1, 0, (0, 70000), MissCode.RANGE),
    ],
)
def test_refuses_parameters_without_a_spec(
    scale: float, zero: int, bounds: tuple[int, int], code: MissCode
) -> None:
    b = GraphBuilder()
    # A range of int16 is stored in int16.
    y = b.call(PER_TENSOR.default, b.arg("x", torch.float32, 3), scale, zero, *bounds)
    program = finish(b, y)
    if bounds == (-128, 200):
        assert "int16[-128,200]" in golden(program, ImportFakeQuantize())
    else:
        assert refusal(program, ImportFakeQuantize())[0] is code


def test_refuses_computed_parameters_and_float_zero_points() -> None:
    b = GraphBuilder()
    x, s = b.arg("x", torch.float32, 3), b.arg("s", torch.float32, 3)
    zero = b.const("z", torch.zeros(3, dtype=torch.int32))
    program = finish(b, b.call(PER_CHANNEL, x, s, zero, 0, -128, 127))
    assert refusal(program, ImportFakeQuantize()) == (MissCode.NOT_CONSTANT, "s")

    b = GraphBuilder()
    x, s = b.arg("x", torch.float32, 3), b.const("s", torch.ones(3))
    y = b.call(PER_CHANNEL, x, s, b.const("z", torch.full((3,), 0.5)), 0, -128, 127)
    assert refusal(finish(b, y), ImportFakeQuantize())[0] is MissCode.DTYPE


@pytest.mark.numeric
@pytest.mark.parametrize("zero", [0, 3, -128])
@pytest.mark.parametrize("bounds", [(-128, 127), (-128, 7)])
@pytest.mark.parametrize("tensor", [False, True])
def test_values_of_a_tensor_are_the_same_bits(
    zero: int, bounds: tuple[int, int], tensor: bool
) -> None:
    scale = float(torch.rand(()) + 0.01)
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 64, 64)
    if tensor:
        params: Any = (
            b.const("s", torch.tensor([scale])),
            b.const("z", torch.tensor([zero], dtype=torch.int32)),
        )
        y = b.call(PER_TENSOR.tensor_qparams, x, *params, *bounds)
    else:
        y = b.call(PER_TENSOR.default, x, scale, zero, *bounds)
    values = torch.randn(64, 64) * 100
    # Ties, and values far outside.
    values[0] = (torch.arange(64) - 31.5) * scale
    values[1, :4] = torch.tensor([1e30, -1e30, 0.0, -0.0])
    assert assert_same_values(finish(b, y), [values], ImportFakeQuantize(), exact=True).fired


@pytest.mark.numeric
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_values_of_channels_are_the_same_bits(axis: int) -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 5, 6, 7)
    size = (5, 6, 7)[axis]
    scale = b.const("s", torch.rand(size) + 0.01)
    zero = b.const("z", torch.randint(-9, 9, (size,), dtype=torch.int32))
    program = finish(b, b.call(PER_CHANNEL, x, scale, zero, axis % 3, -128, 127))
    values = [torch.randn(5, 6, 7) * 30]
    assert assert_same_values(program, values, ImportFakeQuantize(), exact=True).fired


class _Trained(nn.Module):
    """A linear with fake-quantized activation and weight."""

    scale: torch.Tensor
    zero: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 48)
        self.register_buffer("scale", self.fc.weight.detach().abs().amax(1) / 127)
        self.register_buffer("zero", torch.zeros(48, dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.fake_quantize_per_tensor_affine(x, 0.03, 3, -128, 127)
        w = torch.fake_quantize_per_channel_affine(
            self.fc.weight, self.scale, self.zero, 0, -127, 127
        )
        return nn.functional.linear(x, w, self.fc.bias)


@pytest.mark.numeric
@pytest.mark.own_kernels
def test_a_fake_quantized_linear_runs_on_the_int8_kernel() -> None:
    model, x = _Trained().eval(), torch.randn(24, 64)
    fast = qfuse.compile(
        model, (x,), options={"backend": "eager"}, check="site", target=Target.for_testing()
    )
    assert [event.kernel for event in fast.report.fused] == ["qfuse.linear_w8a8"]
    assert not [note.text for note in fast.report.notes if "fake_quantize" in note.text]
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
