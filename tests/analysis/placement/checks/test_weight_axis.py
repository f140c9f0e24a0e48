from __future__ import annotations

import pytest
import torch
from tests.support.lint_graphs import LintBuilder, codes, look
from torch.fx import Node

from qfuse.ir.aten import aten
from qfuse.testing.quant import per_channel


def linear(b: LintBuilder, block: tuple[int | None, ...], n: int = 32, k: int = 64) -> Node:
    x = b.quantized(b.arg("x0", torch.float32, 16, k), 5 / 127, 128)
    return b.linear(x, n, b.weight(n, k, spec=per_channel().with_block(block)))


@pytest.mark.parametrize("block", [(None, 1), (None, 8), (64, 1)])
def test_scales_per_input_feature_are_found(block: tuple[int | None, ...]) -> None:
    found = look(lambda b: linear(b, block), torch.randn(16, 64))

    assert codes(found) == ["weight-axis"]
    (finding,) = (f for f in found if f.code == "weight-axis")
    assert "computed in float" in finding.seen
    assert finding.predicted_us is not None
    assert finding.predicted_us > 0


@pytest.mark.parametrize("block", [(1, None), (None, None), (1, 8), (1, 1), (4, 8)])
def test_scales_per_output_feature_or_in_groups_are_not(block: tuple[int | None, ...]) -> None:
    assert codes(look(lambda b: linear(b, block), torch.randn(16, 64))) == []


def test_one_input_feature_has_one_scale() -> None:
    assert codes(look(lambda b: linear(b, (None, 1), 32, 1), torch.randn(16, 1))) == []


def test_float_activations_do_not_matter() -> None:
    def build(b: LintBuilder) -> Node:
        x = b.arg("x0", torch.float32, 16, 64)
        return b.linear(x, 32, b.weight(32, 64, spec=per_channel().with_block((None, 1))))

    assert codes(look(build, torch.randn(16, 64))) == ["weight-axis"]


@pytest.mark.parametrize(
    ("op", "shape", "block", "found"),
    [
        ("conv2d", (16, 8, 3, 3), (None, 1, None, None), ["weight-axis"]),
        ("conv2d", (16, 8, 3, 3), (1, None, None, None), []),
        ("transposed", (8, 16, 3, 3), (1, None, None, None), ["weight-axis"]),
        ("transposed", (8, 16, 3, 3), (None, 1, None, None), []),
        ("depthwise", (8, 1, 3, 3), (1, None, None, None), []),
    ],
)
def test_convolutions_have_their_own_axes(
    op: str, shape: tuple[int, ...], block: tuple[int | None, ...], found: list[str]
) -> None:
    def build(b: LintBuilder) -> Node:
        x = b.quantized(b.arg("x0", torch.float32, 1, 8, 6, 6), 5 / 127, 128)
        weight = b.weight(*shape, spec=per_channel(4).with_block(block))
        if op == "transposed":
            return b.call(aten.conv_transpose2d.input, x, weight)
        groups = 8 if op == "depthwise" else 1
        return b.call(aten.conv2d.default, x, weight, None, [1, 1], [0, 0], [1, 1], groups)

    assert codes(look(build, torch.randn(1, 8, 6, 6))) == found


def test_it_is_seen_through_a_transpose() -> None:
    """As ``x @ w`` with a weight ``[K, N]`` that was quantized along K."""

    def build(b: LintBuilder) -> Node:
        x = b.quantized(b.arg("x0", torch.float32, 16, 64), 5 / 127, 128)
        weight = b.weight(64, 32, spec=per_channel())
        return b.call(aten.linear.default, x, b.call(aten.transpose.int, weight, 0, 1))

    assert codes(look(build, torch.randn(16, 64))) == ["weight-axis"]
