"""Models that write: what they write is written as before, and is never taken for a constant."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.support.graphs.raw_fx import K, exported
from torch import nn

from qfuse.passes import MergeLinears

aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")


class Counting(nn.Module):
    """Writes a buffer, reads it, and gives it back."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(K, 4), nn.Linear(K, 4)
        self.register_buffer("seen", torch.zeros(K))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Count."""
        seen = self.get_buffer("seen")
        h = x + seen.add_(x.sum(0))
        return self.a(h), self.b(h), seen


@pytest.mark.numeric
def test_what_the_model_writes_is_written_once_per_call() -> None:
    x = torch.randn(3, K)
    model = Counting()
    module, merged = exported(model, x), exported(copy.deepcopy(model), x)
    outcome = MergeLinears()(merged)

    assert outcome.fired == {"merge-linears": 1}
    last = [node for node in merged.graph.nodes if node.op != "output"][-1]
    assert last.target is aten.copy_.default
    for _ in range(3):
        for old, new in zip(module(x), merged(x), strict=True):
            assert torch.allclose(old, new, atol=1e-5)
    assert torch.equal(module.get_buffer("seen"), merged.get_buffer("seen"))


class Scaled(nn.Module):
    """Linears whose weights are written in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", torch.randn(4, K))
        self.register_buffer("u", torch.randn(4, K))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Use the weight, then change it."""
        w, u = self.get_buffer("w"), self.get_buffer("u")
        outs = nn.functional.linear(x, w), nn.functional.linear(x, u)
        w.mul_(0.5)
        return outs


def test_refuses_weights_that_are_written() -> None:
    module = exported(Scaled(), torch.randn(3, K))
    text = module.code
    outcome = MergeLinears()(module)

    assert outcome.modified is False
    assert module.code == text


class Caching(nn.Module):
    """Keys and values that go to a cache, of which the caller gets a view."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.v = nn.Linear(K, K), nn.Linear(K, K)
        self.register_buffer("keys", torch.zeros(4, K))
        self.register_buffer("values", torch.zeros(4, K))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Write, and attend to what is there."""
        keys, values = self.get_buffer("keys"), self.get_buffer("values")
        keys.index_copy_(0, at, self.k(x))
        values.index_copy_(0, at, self.v(x))
        return keys @ values.t(), keys, keys.view(2, -1)


@pytest.mark.numeric
@torch.no_grad()
def test_caches_are_written_and_returned_as_before() -> None:
    x, at = torch.randn(2, K), torch.tensor([1, 2])
    model = Caching()
    with torch.enable_grad():
        module = exported(copy.deepcopy(model), x, at)
    assert MergeLinears()(module).fired == {"merge-linears": 1}

    for _ in range(2):
        for old, new in zip(model(x, at), module(x, at), strict=True):
            assert torch.allclose(old, new, atol=1e-5)
    _, keys, _ = module(x, at)
    assert keys.data_ptr() == module.get_buffer("keys").data_ptr()
    assert torch.allclose(model.get_buffer("values"), module.get_buffer("values"), atol=1e-5)
