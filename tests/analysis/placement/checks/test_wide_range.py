from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from tests.support.lint_graphs import LintBuilder, codes, look
from torch.fx import Node

from qfuse.analysis.placement.finding import LintFinding
from qfuse.testing.quant import per_channel, per_tensor


def wide(
    scale: float, x: torch.Tensor, zero: int = 128, dtype: torch.dtype = torch.uint8
) -> list[LintFinding]:
    def build(b: LintBuilder) -> Node:
        real = b.arg("x0", torch.float32, *x.shape)
        return b.linear(b.quantized(real, scale, zero, per_tensor(2, dtype)), 32)

    return [f for f in look(build, x) if f.code not in {"small-layer", "dynamic-quantization"}]


def test_unused_levels_are_found_and_the_proposed_range_is_not() -> None:
    x = torch.rand(64, 64) * 2 - 1
    (finding,) = wide(0.1, x)

    assert finding.code == "wide-range"
    assert finding.numbers == {"levels_used": 21, "levels": 256}
    scale, zero = re.findall(r"scale of ([0-9.e-]+) and a zero point of (-?\d+)", finding.fix)[0]
    assert wide(float(scale) * 1.001, x, int(zero)) == []


@pytest.mark.parametrize("scale", [2 / 100, 2 / 255])
def test_a_range_of_which_more_is_used_is_not(scale: float) -> None:
    assert wide(scale, torch.rand(64, 64) * 2 - 1) == []


def test_a_relu_uses_half_of_a_symmetric_range_and_is_not_found() -> None:
    assert wide(1 / 127, torch.rand(64, 64), 0, torch.int8) == []


def test_constant_and_small_examples_are_not_judged() -> None:
    assert wide(0.1, torch.ones(64, 64)) == []
    assert wide(0.1, torch.zeros(64, 64)) == []
    assert wide(0.1, torch.rand(2, 16)) == []


def weighted(most: int, low: int = -127) -> list[str]:
    spec = replace(per_channel(), quant_min=low, quant_max=-low)

    def build(b: LintBuilder) -> Node:
        x = b.quantized(b.arg("x0", torch.float32, 64, 64), 5 / 127, 128)
        return b.linear(x, 32, b.weight(32, 64, spec=spec, most=most))

    return codes(look(build, torch.randn(64, 64)))


def test_a_weight_with_scales_that_are_too_large_is_found() -> None:
    assert weighted(10) == ["wide-range"]
    assert weighted(40) == []
    assert weighted(127) == []


def test_a_range_of_few_levels_is_not_judged() -> None:
    assert weighted(1, low=-2) == []


def test_a_bias_in_int32_is_not_judged() -> None:
    spec = per_tensor(1, torch.int32)

    def build(b: LintBuilder) -> Node:
        x = b.quantized(b.arg("x0", torch.float32, 64, 64), 5 / 127, 128)
        stored = torch.randint(-9000, 9000, (128,)).to(torch.int32)
        scale = b.const("bias_scale", torch.tensor([1e-4]))
        bias = b.call(
            torch.ops.qfuse.dequantize.default, b.const("bias", stored), scale, None, str(spec)
        )
        return b.call(torch.ops.aten.linear.default, x, b.weight(128, 64), bias)

    assert codes(look(build, torch.randn(64, 64))) == []


def test_int16_activations_are_not_judged() -> None:
    assert wide(1e-3, torch.rand(64, 64) * 2 - 1, 0, torch.int16) == []
