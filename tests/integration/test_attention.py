"""Attention written out, with quantized products: from the source to the int8 kernel."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from torch import nn

import qfuse
from qfuse.ir.events import Lowered
from qfuse.targets import Target

importlib.import_module("torch.ao.quantization.fx._decomposed")
decomposed = torch.ops.quantized_decomposed

pytestmark = [
    pytest.mark.own_kernels,
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]

HEADS, WIDTH = 4, 64
KERNEL = "qfuse.matmul_a8a8"


def static(x: torch.Tensor, scale: float, zero: int, dtype: torch.dtype) -> torch.Tensor:
    """Quantize and dequantize as PT2E does."""
    info = torch.iinfo(dtype)
    settings = (scale, zero, info.min, info.max, dtype)
    q = decomposed.quantize_per_tensor(x, *settings)
    real: torch.Tensor = decomposed.dequantize_per_tensor(q, *settings)
    return real


def per_row(x: torch.Tensor) -> torch.Tensor:
    """Quantize and dequantize with a scale of each row, by hand."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
    q = torch.clamp(torch.round(x / scale), -128, 127).to(torch.int8)
    return q.to(torch.float32) * scale


class Static(nn.Module):
    """Static parameters per tensor, with a mask."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Attend."""
        q = static(self.heads(q), 0.031, 3, torch.int8)
        k = static(self.heads(k), 0.029, -5, torch.int8)
        v = static(self.heads(v), 0.033, 120, torch.uint8)
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(WIDTH) + mask
        weights = static(torch.softmax(scores, -1), 1 / 255, 0, torch.uint8)
        out = static(torch.matmul(weights, v), 0.017, 4, torch.int8)
        return out.transpose(1, 2).flatten(2)

    @staticmethod
    def heads(x: torch.Tensor) -> torch.Tensor:
        """Split the last axis into heads."""
        return x.reshape(*x.shape[:2], HEADS, -1).transpose(1, 2)


class Dynamic(Static):
    """A scale for each row of queries and keys, chosen at run time; values are static."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Attend."""
        q, k = per_row(self.heads(q)), per_row(self.heads(k))
        v = static(self.heads(v), 0.033, 0, torch.int8)
        scores = torch.matmul(q, k.transpose(-1, -2)) * 0.125 + mask
        weights = per_row(torch.softmax(scores, -1))
        return torch.matmul(weights, v).transpose(1, 2).flatten(2)


class Bmm(Static):
    """Heads are entries of one batch axis, and keys are transposed before they are quantized."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Attend."""
        batch, rows, width = q.shape
        q = static(self.heads(q).reshape(-1, rows, WIDTH), 0.031, 3, torch.int8)
        k = static(self.heads(k).flatten(0, 1).transpose(1, 2), 0.029, -5, torch.int8)
        v = static(self.heads(v).flatten(0, 1), 0.033, 0, torch.int8)
        scores = torch.bmm(q, k).view(batch, HEADS, rows, -1) * 0.125 + mask
        weights = static(torch.softmax(scores, -1), 1 / 127, 0, torch.int8)
        out = torch.bmm(weights.flatten(0, 1), v).view(batch, HEADS, rows, WIDTH)
        return out.transpose(1, 2).reshape(batch, rows, width)


MODELS: dict[str, type[Static]] = {"static": Static, "dynamic": Dynamic, "bmm": Bmm}


def inputs(batch: int, rows: int, columns: int) -> tuple[torch.Tensor, ...]:
    """Return queries, keys, values and a mask."""
    width = HEADS * WIDTH
    mask = torch.zeros(batch, 1, 1, columns).masked_fill(torch.rand(batch, 1, 1, columns) < 0.2, -9)
    return (
        torch.randn(batch, rows, width),
        torch.randn(batch, columns, width),
        torch.randn(batch, columns, width),
        mask,
    )


def compiled(name: str, args: tuple[torch.Tensor, ...], shapes: Any = None) -> Any:
    """Compile without C++, and check every site."""
    return qfuse.compile(
        MODELS[name]().eval(),
        args,
        dynamic_shapes=shapes,
        options={"backend": "eager"},
        check="site",
        target=Target.for_testing(),
    )


def products(fast: Any) -> list[Lowered]:
    """Return how the products were lowered."""
    return [e for e in fast.report.events if isinstance(e, Lowered) and " x " in e.what]


def assert_close(name: str, fast: Any, args: tuple[torch.Tensor, ...]) -> None:
    """Check that a few quantized values differ by a step at most."""
    with torch.no_grad():
        want, got = MODELS[name]()(*args), fast(*args)
    assert (got.shape, got.stride()) == (want.shape, want.stride())
    noise = (got - want).double().square().mean() / want.double().square().mean()
    assert noise < 1e-3, "30 dB: a few flipped codes, not another function"


@pytest.mark.numeric
@pytest.mark.parametrize("name", MODELS)
def test_both_products_run_on_the_kernel(name: str) -> None:
    args = inputs(2, 48, 80)
    fast = compiled(name, args)

    assert fast.report.rolled_back == ()
    assert [event.kernel for event in products(fast)] == [KERNEL] * 2
    assert_close(name, fast, args)
    assert_close(name, fast, inputs(2, 48, 80))


@pytest.mark.numeric
def test_the_scale_and_the_mask_are_in_the_kernel() -> None:
    first, second = products(compiled("static", inputs(2, 48, 80)))

    assert "| mul(0)|add(1,1.0)" in first.what
    assert second.what.endswith("-> int8")
    assert (first.why, second.why) == ("", "")


@pytest.mark.numeric
@pytest.mark.parametrize("name", MODELS)
def test_dynamic_sizes(name: str) -> None:
    batch = torch.export.Dim("batch", max=64)
    rows, columns = torch.export.Dim("rows", max=512), torch.export.Dim("columns", max=512)
    shapes = (
        {0: batch, 1: rows}, {0: batch, 1: columns}, {0: batch, 1: columns}, {0: batch, 3: columns},
    )  # fmt: skip
    fast = compiled(name, inputs(2, 48, 80), shapes)

    assert [event.kernel for event in products(fast)] == [KERNEL] * 2
    for sizes in ((2, 48, 80), (1, 1, 1), (3, 17, 5), (1, 130, 257)):
        assert_close(name, fast, inputs(*sizes))
