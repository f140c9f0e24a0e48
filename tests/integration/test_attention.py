"""Attention written out, with quantized products: from the source to the int8 kernel."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.support.attention_models import (
    KERNEL,
    assert_close,
    compiled,
    kernels,
    per_row,
    products,
    static,
)
from torch import nn

pytestmark = [
    pytest.mark.own_kernels,
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]

HEADS, WIDTH = 4, 64


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


@pytest.mark.numeric
@pytest.mark.parametrize("name", MODELS)
def test_both_products_run_on_the_kernel(name: str) -> None:
    args, model = inputs(2, 48, 80), MODELS[name]()
    fast = compiled(model, args)

    assert fast.report.rolled_back == ()
    assert kernels(fast) == [KERNEL] * 2
    assert_close(model, fast, args)
    assert_close(model, fast, inputs(2, 48, 80))


@pytest.mark.numeric
def test_the_scale_and_the_mask_are_in_the_kernel() -> None:
    first, second = products(compiled(Static(), inputs(2, 48, 80)))

    assert "| mul(0)|add(1,1.0)" in first.what
    assert second.what.endswith("-> int8")
    assert (first.why, second.why) == ("", "")


@pytest.mark.numeric
@pytest.mark.parametrize("name", MODELS)
def test_dynamic_sizes(name: str) -> None:
    batch = torch.export.Dim("batch", max=64)
    rows, columns = torch.export.Dim("rows", max=512), torch.export.Dim("columns", max=512)
    shapes: Any = (
        {0: batch, 1: rows}, {0: batch, 1: columns}, {0: batch, 1: columns}, {0: batch, 3: columns},
    )  # fmt: skip
    model = MODELS[name]()
    fast = compiled(model, inputs(2, 48, 80), shapes)

    assert kernels(fast) == [KERNEL] * 2
    for sizes in ((2, 48, 80), (1, 1, 1), (3, 17, 5), (1, 130, 257)):
        assert_close(model, fast, inputs(*sizes))
