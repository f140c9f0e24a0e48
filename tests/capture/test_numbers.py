"""Numbers that a model reads out of its own buffers and parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.graphs.capture_models import assert_same_run, captured, module

from qfuse.capture import capture
from qfuse.ir.signature.run import run_functional
from qfuse.testing.source import results

pytestmark = pytest.mark.numeric

SCALE, ZERO, FLAG = torch.tensor(0.03), torch.tensor(3), torch.tensor(True)


def _item(self: Any, x: torch.Tensor) -> Any:
    return x / self.b_scale.item() + self.b_zero.item()


def _float(self: Any, x: torch.Tensor) -> Any:
    return x / float(self.b_scale) + int(self.b_zero)


def _computed(self: Any, x: torch.Tensor) -> Any:
    return x * (1.0 / self.b_scale.item()) - (self.b_zero.item() + 1)


def _branch(self: Any, x: torch.Tensor) -> Any:
    return x * self.b_scale.item() if self.b_flag and self.b_scale.item() > 0 else x


def _ops(program: Any) -> list[str]:
    return [str(n.target) for n in program.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("forward", [_item, _float, _computed, _branch])
def test_a_number_of_a_buffer_is_a_number_of_the_graph(forward: Callable[..., Any]) -> None:
    model = module(forward, b_scale=SCALE, b_zero=ZERO, b_flag=FLAG)
    x = torch.randn(4, 3)
    program = captured(model, x)

    assert not [op for op in _ops(program) if "aten" not in op or "item" in op]
    assert not [n for n in program.graph.nodes if n.op == "get_attr"]
    assert_same_run(program, model, x)


@pytest.mark.parametrize("forward", [_item, _computed])
def test_so_is_that_of_an_exported_program(forward: Callable[..., Any]) -> None:
    model = module(forward, b_scale=SCALE, b_zero=ZERO)
    x = torch.randn(4, 3)
    program = capture(torch.export.export(model, (x,)))

    assert not [op for op in _ops(program) if "aten" not in op or "item" in op]
    assert torch.equal(run_functional(program, x)[1], model(x))


def test_a_buffer_that_is_written_is_read_in_each_call() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        self.b_count.add_(1)
        return x * self.b_count.item()

    model = module(forward, b_count=torch.tensor(1.0))
    program = captured(model, torch.randn(2))

    assert [op for op in _ops(program) if "item" in op]
    for _ in range(2):
        x, source = torch.randn(2), copy.deepcopy(model)
        assert torch.equal(run_functional(program, x)[1], source(x))


def test_a_number_of_an_input_stays_one_of_each_call() -> None:
    def forward(self: Any, x: torch.Tensor, scale: torch.Tensor) -> Any:
        del self
        return x * scale.item()

    program = captured(module(forward), torch.randn(2), torch.tensor(2.0))

    assert [op for op in _ops(program) if "item" in op]


def test_a_size_that_a_buffer_gives_is_a_number() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        return x[: int(self.b_count)]

    model = module(forward, b_count=torch.tensor(2))
    program = captured(model, torch.randn(4, 3))
    (out,) = results(program)
    assert out.meta["val"].shape == (2, 3)
    assert_same_run(program, model, torch.randn(4, 3))


def test_a_size_of_an_exported_program_stays_a_symbol() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        count = self.b_count.item()
        check: Any = torch._check
        check(count >= 2)
        check(count <= 3)
        return x[:count] * count

    model = module(forward, b_count=torch.tensor(2))
    x = torch.randn(4, 3)
    program = capture(torch.export.export(model, (x,)))

    assert [op for op in _ops(program) if "item" in op]
    assert torch.equal(run_functional(program, x)[1], model(x))


def test_a_number_that_is_returned() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        return x * self.b_scale.item(), self.b_scale.item()

    model, x = module(forward, b_scale=SCALE), torch.randn(3)
    program = captured(model, x)

    got, number = run_functional(program, x)[1]
    assert torch.equal(got, model(x)[0])
    assert float(number) == SCALE.item()
