from __future__ import annotations

import pytest
import torch
from tests.support.lint_graphs import LintBuilder, codes, look
from torch.fx import Node

from qfuse.analysis.placement.finding import Severity
from qfuse.ir.aten import aten
from qfuse.ir.ops import library as ops


def read_by(b: LintBuilder, reader: str, quantize: bool = True) -> Node | tuple[Node, ...]:
    x = b.call(aten.gelu.default, b.arg("x0", torch.float32, 16, 64))
    q, params = b.stored(x, 0.02, 10)
    y = b.call(ops.dequantize, q, *params) if quantize else x
    if reader == "sin":
        return b.call(aten.sin.default, b.call(aten.view.default, y, [64, 16]))
    if reader == "linear":
        return b.linear(y, 32)
    if reader == "both":
        return b.call(aten.sin.default, y), b.linear(y, 32)
    if reader == "caller":
        return y
    assert reader == "stored"
    return q, b.call(aten.sin.default, y)


@pytest.mark.parametrize(
    ("reader", "name"), [("sin", "aten.sin"), ("caller", "the caller of the model")]
)
def test_a_tensor_that_is_read_in_float_only_is_found(reader: str, name: str) -> None:
    found = look(lambda b: read_by(b, reader), torch.randn(16, 64))

    assert codes(found) == ["never-computed-on"]
    (finding,) = (f for f in found if f.code == "never-computed-on")
    assert finding.numbers["readers"] == name
    # The gelu in front quantizes its result.
    assert finding.severity is Severity.INFO
    assert finding.place.op == "qfuse.activation"
    assert codes(look(lambda b: read_by(b, reader, quantize=False), torch.randn(16, 64))) == []


def test_a_quantize_of_its_own_is_a_warning() -> None:
    def build(b: LintBuilder) -> Node:
        return b.call(aten.sin.default, b.quantized(b.arg("x0", torch.float32, 16, 64), 0.04, 128))

    (finding,) = (f for f in look(build, torch.randn(16, 64)) if f.code == "never-computed-on")
    assert finding.severity is Severity.WARNING
    assert finding.predicted_us is not None
    assert finding.predicted_us > 1


@pytest.mark.parametrize("reader", ["linear", "both", "stored"])
def test_a_tensor_that_is_computed_on_or_returned_is_not(reader: str) -> None:
    assert codes(look(lambda b: read_by(b, reader), torch.randn(16, 64))) == []


def test_a_pair_around_a_movement_is_part_of_the_product() -> None:
    def build(b: LintBuilder) -> Node:
        x = b.quantized(b.arg("x0", torch.float32, 16, 64), 5 / 127, 128)
        return b.linear(b.call(aten.view.default, x, [4, 4, 64]), 32)

    assert codes(look(build, torch.randn(16, 64))) == []
