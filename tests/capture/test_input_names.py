"""Inputs may have names by which generated code means something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.graphs.capture_models import module

from qfuse.capture import capture
from qfuse.ir.signature.run import run_functional


def of_torch(self: Any, x: torch.Tensor, torch: torch.Tensor) -> Any:
    del self
    return x.relu() + torch


def of_inf(self: Any, x: torch.Tensor, inf: torch.Tensor, inf_1: torch.Tensor) -> Any:
    del self
    return x.masked_fill(inf > 0, float("-inf")).relu() + inf_1


def of_nan(self: Any, x: torch.Tensor, nan: torch.Tensor, device: torch.Tensor) -> Any:
    del self
    return x.masked_fill(nan > 0, float("nan")), x.new_zeros(2) + device[0, :2]


@pytest.mark.parametrize("forward", [of_torch, of_inf, of_nan])
def test_the_graph_runs(forward: Any) -> None:
    _, *names, _ = forward.__annotations__
    inputs = [torch.randn(3, 4) for _ in names]
    model = module(forward)
    program = capture(model, tuple(inputs))

    _, result = run_functional(program, *inputs)
    torch.testing.assert_close(result, model(*inputs), rtol=0, atol=0, equal_nan=True)
    assert [spec.name for spec in program.signature.inputs] == names
