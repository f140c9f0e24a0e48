from __future__ import annotations

import pytest
import torch
from tests.support.lint_graphs import LintBuilder, codes, look
from torch.fx import Node

from qfuse.ir.aten import aten

SCALE, ZERO = 0.04, 100


def residual(b: LintBuilder, branch: str, after: str = "relu") -> Node:
    """A linear of a quantized x, plus x or another linear, then an activation and a quantize."""
    x = b.call(aten.gelu.default, b.arg("x0", torch.float32, 64, 32))
    q = b.quantized(x, SCALE, ZERO)
    left = b.linear(q, 32)
    right = {
        "float": lambda: x,
        "quantized": lambda: q,
        "product": lambda: b.linear(q, 32),
        "quantized product": lambda: b.quantized(b.linear(q, 32), 0.02, 128),
        "constant": lambda: b.const("table", torch.randn(64, 32)),
        "row": lambda: b.call(aten.mean.dim, x, [0], True),
        "viewed": lambda: b.call(
            aten.view.default, b.call(aten.view.default, x, [32, 64]), [64, 32]
        ),
    }[branch]()
    total = b.call(aten.add.Tensor, left, right)
    if after == "norm":
        total = b.call(aten.layer_norm.default, total, [32])
    if after == "relu":
        total = b.call(aten.relu.default, total)
    if after == "float":
        return total
    return b.linear(b.dynamic(total) if after == "dynamic" else b.quantized(total, 0.05, 100), 16)


def inputs() -> torch.Tensor:
    return torch.randn(64, 32)


@pytest.mark.parametrize("branch", ["float", "product", "viewed"])
def test_a_float_branch_is_found(branch: str) -> None:
    found = look(lambda b: residual(b, branch), inputs())

    assert codes(found) == ["float-residual"]
    (finding,) = (f for f in found if f.code == "float-residual")
    assert finding.place.op == "aten.add.Tensor"
    assert finding.predicted_us is not None
    assert finding.predicted_us > 0
    assert "64x32" in finding.seen


@pytest.mark.parametrize("fixed", ["quantized", "quantized product"])
def test_a_quantized_branch_is_not(fixed: str) -> None:
    assert "float-residual" not in codes(look(lambda b: residual(b, fixed), inputs()))


@pytest.mark.parametrize(
    ("branch", "after"),
    [
        ("float", "norm"),
        ("float", "float"),
        ("float", "dynamic"),
        ("constant", "relu"),
        ("row", "relu"),
    ],
)
def test_sums_that_are_meant_in_float_are_not_reported(branch: str, after: str) -> None:
    assert "float-residual" not in codes(look(lambda b: residual(b, branch, after), inputs()))


def test_the_sides_may_be_swapped() -> None:
    def build(b: LintBuilder) -> Node:
        x = b.call(aten.gelu.default, b.arg("x0", torch.float32, 64, 32))
        left = b.linear(b.quantized(x, SCALE, ZERO), 32)
        return b.linear(b.quantized(b.call(aten.add.Tensor, x, left), 0.05, 100), 8)

    assert codes(look(build, inputs())) == ["float-residual"]
