"""Grouped-query attention in the spellings of models: keys and values are not copied."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.attention_models import (
    KERNEL,
    assert_close,
    compiled,
    dynamic,
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

SHARED, GROUP, WIDTH = 2, 4, 64

Quantize = Callable[[torch.Tensor], torch.Tensor]
Repeat = Callable[[torch.Tensor], torch.Tensor]


def by_tensor(x: torch.Tensor) -> torch.Tensor:
    """Static parameters."""
    return static(x, 0.03, 3)


SCHEMES: dict[str, tuple[Quantize, Quantize]] = {
    "static": (by_tensor, by_tensor),
    "per tensor": (dynamic, dynamic),
    "per row": (per_row, by_tensor),
}
"""How keys, and how values are quantized."""


def repeat_kv(x: torch.Tensor) -> torch.Tensor:
    """Repeat heads as transformers does."""
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, GROUP, s, d).reshape(b, h * GROUP, s, d)


def interleave(x: torch.Tensor) -> torch.Tensor:
    """Repeat heads with one op."""
    return x.repeat_interleave(GROUP, 1)


REPEATS: dict[str, Repeat] = {"repeat_kv": repeat_kv, "repeat_interleave": interleave}


class Repeated(nn.Module):
    """Keys and values are repeated, before or after they are quantized."""

    def __init__(self, scheme: str, repeat: str, *, first: bool) -> None:
        super().__init__()
        self.of_keys, self.of_values = SCHEMES[scheme]
        self.repeat, self.first = REPEATS[repeat], first

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Attend."""
        keys = self.expanded(k, self.of_keys)
        scores = self.of_keys(q) @ keys.transpose(2, 3) * 0.125 + mask
        weights = self.of_keys(torch.softmax(scores, -1))
        return weights @ self.expanded(v, self.of_values)

    def expanded(self, x: torch.Tensor, quantize: Quantize) -> torch.Tensor:
        """Quantize and repeat."""
        return self.repeat(quantize(x)) if self.first else quantize(self.repeat(x))


class Einsum(nn.Module):
    """Groups have an axis of their own; heads are before or behind the tokens."""

    def __init__(self, scheme: str, *, behind: bool) -> None:
        super().__init__()
        self.of_keys, self.of_values = SCHEMES[scheme]
        self.equations = ("bqhgd,bkhd->bhgqk", "bhgqk,bkhd->bqhgd")
        if not behind:
            self.equations = ("bhgqd,bhkd->bhgqk", "bhgqk,bhkd->bhgqd")
        self.behind = behind

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Attend."""
        batch, _, rows, width = q.shape
        q = self.of_keys(q).view(batch, SHARED, GROUP, rows, width)
        k, v = self.of_keys(k), self.of_values(v)
        if self.behind:
            q, k, v = q.permute(0, 3, 1, 2, 4), k.transpose(1, 2), v.transpose(1, 2)
        scores = torch.einsum(self.equations[0], q, k) * 0.125 + mask[:, :, None]
        weights = self.of_keys(torch.softmax(scores, -1))
        return torch.einsum(self.equations[1], weights, v)


def inputs(batch: int, rows: int, columns: int) -> tuple[torch.Tensor, ...]:
    """Return queries, keys, values and a mask."""
    shared = (batch, SHARED, columns, WIDTH)
    mask = torch.zeros(batch, 1, 1, columns).masked_fill(torch.rand(batch, 1, 1, columns) < 0.2, -9)
    queries = torch.randn(batch, SHARED * GROUP, rows, WIDTH)
    return queries, torch.randn(shared), torch.randn(shared), mask


def assert_nothing_is_copied(plan: object) -> None:
    """Check that no op of the lowered graph repeats elements."""
    text = str(plan)
    assert "aten.expand" not in text
    assert "aten.clone" not in text
    assert "repeat_interleave" not in text


@pytest.mark.numeric
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("repeat", REPEATS)
@pytest.mark.parametrize("first", [True, False], ids=["quantized first", "repeated first"])
def test_repeated_heads(scheme: str, repeat: str, first: bool) -> None:
    args, model = inputs(2, 48, 80), Repeated(scheme, repeat, first=first)
    fast = compiled(model, args)

    assert fast.report.rolled_back == ()
    assert kernels(fast) == [KERNEL] * 2
    # Scales that are chosen of copies are not known to be equal.
    if first or scheme == "static":
        assert_nothing_is_copied(fast.plan)
    assert "| mul(0)|add(1,1.0)" in products(fast)[0].what
    assert_close(model, fast, args)
    assert_close(model, fast, inputs(2, 48, 80))


@pytest.mark.numeric
@pytest.mark.parametrize("scheme", SCHEMES)
def test_dynamic_sizes(scheme: str) -> None:
    batch = torch.export.Dim("batch", max=64)
    rows, columns = torch.export.Dim("rows", max=512), torch.export.Dim("columns", max=512)
    shapes = (
        {0: batch, 2: rows}, {0: batch, 2: columns}, {0: batch, 2: columns}, {0: batch, 3: columns},
    )  # fmt: skip
    model = Repeated(scheme, "repeat_kv", first=True)
    fast = compiled(model, inputs(2, 48, 80), shapes)

    assert kernels(fast) == [KERNEL] * 2
    assert_nothing_is_copied(fast.plan)
    for sizes in ((2, 48, 80), (1, 1, 1), (3, 17, 5), (1, 1, 257)):
        assert_close(model, fast, inputs(*sizes))


@pytest.mark.numeric
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("behind", [False, True], ids=["heads first", "tokens first"])
def test_einsum(scheme: str, behind: bool) -> None:
    args, model = inputs(2, 48, 80), Einsum(scheme, behind=behind)
    fast = compiled(model, args)

    assert fast.report.rolled_back == ()
    assert kernels(fast) == [KERNEL] * 2
    assert_close(model, fast, args)


class Gram(nn.Module):
    """A tensor is multiplied with itself."""

    def __init__(self, scheme: str, *, tokens: bool) -> None:
        super().__init__()
        self.quantize, self.tokens = SCHEMES[scheme][0], tokens

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        x = self.quantize(x)
        return x @ x.mT if self.tokens else x.mT @ x


@pytest.mark.numeric
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(256, 256), (3, 128, 192)], ids=str)
@pytest.mark.parametrize("tokens", [True, False])
def test_a_tensor_with_itself(scheme: str, shape: tuple[int, ...], tokens: bool) -> None:
    args, model = (torch.randn(shape),), Gram(scheme, tokens=tokens)
    fast = compiled(model, args)

    assert fast.report.rolled_back == ()
    # A scale of each row is along the axis that is summed if the left operand is transposed.
    along = scheme == "per row" and not tokens
    assert kernels(fast) == ["expand" if along else KERNEL]
    assert_close(model, fast, args)
