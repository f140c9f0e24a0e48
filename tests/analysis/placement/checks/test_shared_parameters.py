from __future__ import annotations

import pytest
import torch
from tests.support.lint_graphs import LintBuilder, codes, look
from torch.fx import Node

from qfuse.ir.aten import aten


def images() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 4, 8, 8), torch.randn(2, 4, 8, 8)


def joined(b: LintBuilder, scales: tuple[float, float], out: float, op: str = "cat") -> Node:
    parts = [
        b.quantized(b.arg(f"x{i}", torch.float32, 2, 4, 8, 8), scale, 128)
        for i, scale in enumerate(scales)
    ]
    y = b.call(getattr(aten, op).default, parts, 1)
    y = b.quantized(y, out, 128)
    return b.linear(y, 8)


@pytest.mark.parametrize("op", ["cat", "stack"])
@pytest.mark.parametrize(("scales", "different"), [((0.05, 0.06), 1), ((0.07, 0.06), 2)])
def test_other_scales_at_a_join_are_found(
    op: str, scales: tuple[float, float], different: int
) -> None:
    found = look(lambda b: joined(b, scales, 0.05, op), *images())

    assert codes(found) == ["cat-scales"]
    (finding,) = (f for f in found if f.code == "cat-scales")
    assert finding.numbers == {"inputs": 2, "different": different}
    assert finding.place.op == f"aten.{op}"


def test_one_scale_around_a_join_is_not() -> None:
    assert codes(look(lambda b: joined(b, (0.05, 0.05), 0.05), *images())) == []


def test_a_join_that_is_used_in_float_is_not() -> None:
    def build(b: LintBuilder) -> Node:
        parts = [
            b.quantized(
                b.linear(b.quantized(b.arg(f"x{i}", torch.float32, 4, 8), 0.05, 128), 8), s, 128
            )
            for i, s in enumerate((0.05, 0.06))
        ]
        return b.call(aten.softmax.int, b.call(aten.cat.default, parts, 1), -1)

    assert "cat-scales" not in codes(look(build, torch.randn(4, 8), torch.randn(4, 8)))


def test_float_inputs_of_a_join_are_not() -> None:
    def build(b: LintBuilder) -> Node:
        quantized = b.quantized(b.arg("x0", torch.float32, 4, 8), 0.05, 128)
        real = b.call(aten.gelu.default, b.arg("x1", torch.float32, 4, 8))
        return b.linear(b.quantized(b.call(aten.cat.default, [quantized, real], 1), 0.05, 128), 8)

    assert codes(look(build, torch.randn(4, 8), torch.randn(4, 8))) == []


def pooled(b: LintBuilder, out: float, op: str = "max") -> Node:
    x = b.quantized(b.arg("x0", torch.float32, 2, 4, 8, 8), 0.05, 128)
    if op == "max":
        y = b.call(aten.max_pool2d.default, x, [2, 2], [2, 2])
    elif op == "indices":
        y = b.item(b.call(aten.max_pool2d_with_indices.default, x, [2, 2], [2, 2]), 0)
    else:
        y = b.call(aten.avg_pool2d.default, x, [2, 2], [2, 2])
    return b.linear(b.quantized(y, out, 128), 8)


@pytest.mark.parametrize("op", ["max", "indices"])
def test_other_scales_around_a_max_pool_are_found(op: str) -> None:
    assert codes(look(lambda b: pooled(b, 0.051, op), images()[0])) == ["pool-scales"]
    assert codes(look(lambda b: pooled(b, 0.05, op), images()[0])) == []


def test_an_average_has_a_range_of_its_own() -> None:
    assert "pool-scales" not in codes(look(lambda b: pooled(b, 0.02, "average"), images()[0]))


def shared(b: LintBuilder, second: float) -> tuple[Node, Node]:
    x = b.call(aten.gelu.default, b.arg("x0", torch.float32, 8, 16))
    return b.linear(b.quantized(x, 0.02, 20), 8), b.linear(b.quantized(x, second, 20), 8)


def test_a_tensor_quantized_twice_is_found() -> None:
    found = look(lambda b: shared(b, 0.025), torch.randn(8, 16))
    assert codes(found) == ["shared-edge"]
    assert next(f for f in found if f.code == "shared-edge").numbers == {"times": 2}
    assert codes(look(lambda b: shared(b, 0.02), torch.randn(8, 16))) == []
