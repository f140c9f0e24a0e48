from __future__ import annotations

import re

import pytest
import torch
from tests.support.lint_graphs import UINT8, LintBuilder, codes, look
from torch.fx import Node

from qfuse.analysis.placement.finding import LintFinding, Severity
from qfuse.ir.aten import aten
from qfuse.testing.quant import per_channel, per_tensor


def linear(b: LintBuilder, scale: float, zero: int | None, dtype: torch.dtype) -> Node:
    x = b.arg("x0", torch.float32, 64, 64)
    return b.linear(b.quantized(x, scale, zero, per_tensor(2, dtype)), 32)


def of(
    scale: float, zero: int | None, x: torch.Tensor, dtype: torch.dtype = UINT8
) -> list[LintFinding]:
    found = look(lambda b: linear(b, scale, zero, dtype), x)
    return [f for f in found if f.code not in {"small-layer", "dynamic-quantization"}]


@pytest.mark.parametrize(("zero", "dtype"), [(128, UINT8), (0, torch.int8), (None, torch.int8)])
def test_a_range_that_clips_is_found_and_the_proposed_one_is_not(
    zero: int | None, dtype: torch.dtype
) -> None:
    x = torch.randn(64, 64)
    (finding,) = of(0.01, zero, x, dtype)

    assert finding.code == "clipped-range"
    share = float(((x > 1.275) | (x < -1.285)).float().mean())
    assert finding.numbers["clipped_fraction"] == pytest.approx(share, abs=0.01)
    assert finding.numbers["value_high"] == pytest.approx(float(x.max()))
    scale, point = re.findall(r"scale of ([0-9.e-]+) and a zero point of (-?\d+)", finding.fix)[0]
    fixed = float(scale) * 1.001
    assert of(fixed, int(point) if zero is not None else None, x, dtype) == []


def test_one_outlier_that_dominates_the_error_is_found() -> None:
    x = torch.randn(64, 64)
    x[3, 5] = 40.0
    (finding,) = of(0.03, 128, x)
    assert finding.numbers["clipped_fraction"] == pytest.approx(1 / 4096)


def test_clipping_that_is_worth_it_is_not_found() -> None:
    """A few values are just beyond the range, as where calibration weighs clipping and rounding."""
    x = torch.randn(64, 64).clamp(-3, 3)
    x[0, 0], x[0, 1] = 3.2, -3.2
    assert of(3.1 / 127, 128, x) == []


def test_a_range_that_fits_is_not_found() -> None:
    assert of(5 / 127, 128, torch.randn(64, 64)) == []


def test_values_that_are_not_finite_are_not_counted() -> None:
    x = torch.randn(64, 64)
    x[0, :3] = torch.tensor([float("inf"), float("nan"), -float("inf")])
    assert of(5 / 127, 128, x) == []


def test_a_range_that_acts_as_relu_is_information() -> None:
    (finding,) = of(0.02, 0, torch.randn(64, 64))
    assert finding.code == "range-as-relu"
    assert finding.severity is Severity.INFO
    assert finding.numbers["clipped_fraction"] == pytest.approx(0.5, abs=0.05)


def test_a_relu_in_front_leaves_nothing_to_report() -> None:
    def build(b: LintBuilder) -> Node:
        x = b.call(aten.relu.default, b.arg("x0", torch.float32, 64, 64))
        return b.linear(b.quantized(x, 0.02, 0), 32)

    assert codes(look(build, torch.randn(64, 64))) == []


def test_every_scale_has_a_range_of_its_own() -> None:
    """Rows of very different sizes, each with its scale: nothing is clipped."""

    def build(b: LintBuilder) -> Node:
        x = b.arg("x0", torch.float32, 64, 64)
        size = 10.0 ** torch.arange(-2, 2).repeat(16).reshape(64, 1)
        return b.linear(b.quantized(x, size * 5 / 127, None, per_channel()), 32)

    sizes = 10.0 ** torch.arange(-2, 2).repeat(16).reshape(64, 1)
    assert codes(look(build, torch.randn(64, 64) * sizes)) == []
