from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support.lint_graphs import LintBuilder, codes, look
from torch.fx import Node

from qfuse.ir.aten import aten
from qfuse.ir.quant.spec import QuantSpec
from qfuse.testing.quant import per_tensor

INT8 = per_tensor(2)


def linear(b: LintBuilder, block: tuple[int | None, ...]) -> Node:
    spec = INT8.with_block(block)
    x = b.arg("x0", torch.float32, 32, 64)
    scale = torch.rand([int(g) for g in spec.grid((32, 64))]) * 1e-3 + 0.04
    return b.linear(b.quantized(x, scale, None, spec), 48)


@pytest.mark.parametrize("block", [(None, 1), (1, 1), (None, 16)])
def test_scales_along_the_summed_axis_are_found(block: tuple[int | None, ...]) -> None:
    found = look(lambda b: linear(b, block), torch.randn(32, 64))

    assert codes(found) == ["per-channel-activation"]
    (finding,) = (f for f in found if f.code == "per-channel-activation")
    assert finding.place.op == "aten.linear"
    assert finding.predicted_us is not None
    assert finding.predicted_us > 0


@pytest.mark.parametrize("block", [(None, None), (1, None), (4, None), (None, 64)])
def test_scales_of_rows_or_of_the_tensor_are_not(block: tuple[int | None, ...]) -> None:
    assert codes(look(lambda b: linear(b, block), torch.randn(32, 64))) == []


@pytest.mark.parametrize(("turned", "found"), [(False, ["per-channel-activation"]), (True, [])])
def test_it_is_seen_through_a_transpose(turned: bool, found: list[str]) -> None:
    def build(b: LintBuilder) -> Node:
        block = (None, 1) if not turned else (1, None)
        x = b.arg("x0", torch.float32, 64, 64)
        spec = INT8.with_block(block)
        scale = torch.full([int(g) for g in spec.grid((64, 64))], 0.04)
        real = b.quantized(x, scale, None, spec)
        return b.linear(
            b.call(aten.transpose.int, b.call(aten.transpose.int, real, 0, 1), 0, 1), 16
        )

    assert codes(look(build, torch.randn(64, 64))) == found


def convolution(b: LintBuilder, groups: int) -> Node:
    spec: QuantSpec = replace(per_tensor(4), block=(None, 1, None, None))
    x = b.arg("x0", torch.float32, 1, 8, 6, 6)
    real = b.quantized(x, torch.rand(1, 8, 1, 1) * 1e-3 + 0.04, None, spec)
    weight = b.weight(8, 8 // groups, 3, 3)
    return b.call(aten.conv2d.default, real, weight, None, [1, 1], [1, 1], [1, 1], groups)


def test_channels_of_a_convolution_are_summed_but_not_if_it_is_depthwise() -> None:
    assert codes(look(lambda b: convolution(b, 1), torch.randn(1, 8, 6, 6))) == [
        "per-channel-activation"
    ]
    assert codes(look(lambda b: convolution(b, 8), torch.randn(1, 8, 6, 6))) == []


@pytest.mark.parametrize(("side", "axis"), [("left", 1), ("right", 0)])
def test_both_operands_of_a_matmul_are_activations(side: str, axis: int) -> None:
    def build(b: LintBuilder) -> Node:
        sides = {}
        for i, name in enumerate(("left", "right")):
            spec = (
                INT8
                if name != side
                else INT8.with_block(tuple(1 if a == axis else None for a in (0, 1)))
            )
            x = b.arg(f"x{i}", torch.float32, 32, 32)
            scale = torch.full([int(g) for g in spec.grid((32, 32))], 0.04)
            sides[name] = b.quantized(x, scale, None, spec)
        return b.call(aten.matmul.default, sides["left"], sides["right"])

    assert codes(look(build, torch.randn(32, 32), torch.randn(32, 32))) == [
        "per-channel-activation"
    ]
