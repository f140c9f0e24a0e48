from __future__ import annotations

import pytest
import torch
from tests.support.lint_graphs import LintBuilder, codes, look
from torch.fx import Node

from qfuse.ir.aten import aten
from qfuse.testing.quant import per_channel, per_tensor


def twice(b: LintBuilder, scale: float, zero: int, between: str = "nothing") -> Node:
    x = b.quantized(b.arg("x0", torch.float32, 8, 16), 0.04, 120)
    if between == "view":
        x = b.call(aten.view.default, x, [4, 32])
    if between == "transpose":
        x = b.call(aten.clone.default, b.call(aten.transpose.int, x, 0, 1))
    if between == "gelu":
        x = b.call(aten.gelu.default, x)
    y = b.quantized(x, scale, zero)
    return b.linear(y, 8)


@pytest.mark.parametrize("between", ["nothing", "view", "transpose"])
@pytest.mark.parametrize(("scale", "zero"), [(0.05, 120), (0.02, 120), (0.04, 100)])
def test_other_parameters_are_found(between: str, scale: float, zero: int) -> None:
    found = look(lambda b: twice(b, scale, zero, between), torch.randn(8, 16))

    assert "double-rounding" in codes(found)
    (finding,) = (f for f in found if f.code == "double-rounding")
    assert "0.04" in finding.seen
    assert f"{scale}" in finding.seen
    assert finding.numbers["scale_ratio"] == pytest.approx(scale / 0.04)


@pytest.mark.parametrize("between", ["nothing", "view", "transpose"])
def test_the_same_parameters_are_not(between: str) -> None:
    assert codes(look(lambda b: twice(b, 0.04, 120, between), torch.randn(8, 16))) == []


def test_a_computation_in_between_needs_its_own_parameters() -> None:
    found = look(lambda b: twice(b, 0.03, 10, "gelu"), torch.randn(8, 16))
    assert "double-rounding" not in codes(found)


def test_a_dynamic_quantize_of_a_quantized_tensor_is_found() -> None:
    def build(b: LintBuilder) -> Node:
        x = b.quantized(b.arg("x0", torch.float32, 8, 16), 0.04, 120)
        return b.linear(b.dynamic(x), 8)

    found = look(build, torch.randn(8, 16))
    assert "double-rounding" in codes(found)
    assert "chosen at run time" in next(f.seen for f in found if f.code == "double-rounding")


def test_a_weight_that_is_quantized_again_is_found() -> None:
    def build(b: LintBuilder) -> Node:
        weight = b.weight(8, 16)
        again = b.quantized(weight, 1e-3, None, per_tensor(2))
        return b.linear(b.quantized(b.arg("x0", torch.float32, 8, 16), 0.04, 120), 8, again)

    found = [f for f in look(build, torch.randn(8, 16)) if f.code == "double-rounding"]
    assert len(found) == 1
    assert "a quantized weight" in found[0].seen


def test_per_channel_parameters_that_are_repeated_are_not_found() -> None:
    """The same nodes of scale and zero point: the second quantize changes nothing."""

    def build(b: LintBuilder) -> Node:
        x = b.arg("x0", torch.float32, 8, 16)
        q, params = b.stored(x, torch.rand(8, 1) * 0.01 + 0.03, None, per_channel())
        real = b.call(torch.ops.qfuse.dequantize.default, q, *params)
        again = b.call(torch.ops.qfuse.quantize.default, real, *params)
        return b.call(torch.ops.qfuse.dequantize.default, again, *params)

    assert "double-rounding" not in codes(look(build, torch.randn(8, 16)))
