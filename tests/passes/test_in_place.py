"""Ops in place on the way: taken for their functional forms where nobody can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.graphs.raw_fx import untouched
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from qfuse.passes import MergeLinears
from qfuse.passes.in_place import functional_of

aten = torch.ops.aten


class Normed(nn.Module):
    """Two linears behind a norm, which torch takes apart into ops of which one is in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32)
        self.a, self.b = nn.Linear(32, 8), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute."""
        h = self.norm(x)
        return self.a(h), self.b(h)


@pytest.mark.numeric
@torch.no_grad()
def test_a_write_to_a_value_of_its_own_is_functional() -> None:
    model, x = Normed().eval(), torch.randn(4, 32)
    module = make_fx(model)(x)
    assert module.graph.find_nodes(op="call_function", target=aten.add_.Scalar)

    assert MergeLinears()(module).fired == {"merge-linears": 1}
    assert not module.graph.find_nodes(op="call_function", target=aten.add_.Scalar)
    torch.testing.assert_close(module(x), model(x))
    assert not MergeLinears()(module).modified


def test_a_graph_that_does_not_change_keeps_its_writes() -> None:
    module = make_fx(lambda x: (x + 1).relu_().mul_(2))(torch.randn(3))
    text = str(module.graph)

    assert not MergeLinears()(module).modified
    assert str(module.graph) == text


def seen_by_a_view(x: torch.Tensor) -> Any:
    y = x + 1
    z = y.view(-1)
    return y.relu_(), z


def read_before(x: torch.Tensor) -> Any:
    y = x + 1
    z = y * 2
    return y.relu_(), z


def of_an_input(x: torch.Tensor) -> Any:
    return x.relu_()


def of_a_view_of_an_input(x: torch.Tensor) -> Any:
    return x.view(-1).relu_()


def with_itself(x: torch.Tensor) -> Any:
    y = x + 1
    return y.add_(y)


def in_a_narrower_type(x: torch.Tensor) -> Any:
    return x.bfloat16().mul(2).add_(x)


def of_random_numbers(x: torch.Tensor) -> Any:
    return (x + 1).bernoulli_(0.5)


def of_other_strides(x: torch.Tensor) -> Any:
    return x.t().clone().add_(x)


@pytest.mark.parametrize(
    "call",
    [
        seen_by_a_view,
        read_before,
        of_an_input,
        of_a_view_of_an_input,
        with_itself,
        in_a_narrower_type,
        of_random_numbers,
    ],
)
def test_refuses_writes_that_somebody_may_see(call: Callable[..., Any]) -> None:
    module = make_fx(call)(torch.randn(3, 3))

    assert "writes to its argument" in str(untouched(module, lambda: MergeLinears()(module)))


def test_the_strides_are_those_of_what_is_written() -> None:
    module = make_fx(of_other_strides)(torch.randn(3, 3))
    (node,) = module.graph.find_nodes(op="call_function", target=aten.add_.Tensor)
    functional = functional_of(node)

    x = torch.randn(3, 3)
    if functional is not None:
        assert functional(x.t().clone(), x).stride() == x.t().clone().stride()
