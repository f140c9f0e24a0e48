from __future__ import annotations

import pytest
import torch
from tests.support.lint_graphs import LintBuilder, look
from torch.fx import Node

from qfuse.analysis.placement.finding import LintFinding


def small(
    rows: int, k: int, n: int, *, dynamic: bool = True, quantized: bool = True
) -> list[LintFinding]:
    def build(b: LintBuilder) -> Node:
        x = b.arg("x0", torch.float32, rows, k)
        if not quantized:
            return b.call(torch.ops.aten.linear.default, x, b.const("w", torch.randn(n, k)))
        return b.linear(b.dynamic(x) if dynamic else b.quantized(x, 5 / 127, 128), n)

    found = look(build, torch.randn(rows, k))
    return [f for f in found if f.code == "small-layer"]


def test_a_small_layer_is_found_and_in_float_it_is_not() -> None:
    (finding,) = small(32, 32, 16)

    assert finding.place.op == "aten.linear"
    quantized, real = (finding.numbers[key] for key in ("quantized_us", "float_us"))
    assert isinstance(quantized, float)
    assert isinstance(real, float)
    assert quantized > 1.25 * real
    assert finding.predicted_us == pytest.approx(quantized - real)
    assert small(32, 32, 16, quantized=False) == []


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_large_layer_is_not(dynamic: bool) -> None:
    assert small(512, 1024, 1024, dynamic=dynamic) == []


def test_the_quantize_of_a_shared_input_is_counted_once() -> None:
    """Alone, the layer is too small; with many others that read the same quantize, it is less so."""

    def build(b: LintBuilder, count: int) -> tuple[Node, ...]:
        x = b.dynamic(b.arg("x0", torch.float32, 64, 256))
        return tuple(b.linear(x, 16) for _ in range(count))

    def cost(count: int) -> float:
        found = [
            f
            for f in look(lambda b: build(b, count), torch.randn(64, 256))
            if f.code == "small-layer"
        ]
        return sum(float(f.numbers["quantized_us"]) for f in found)

    assert cost(4) < 4 * cost(1)
