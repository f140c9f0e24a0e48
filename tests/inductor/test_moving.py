"""Quantization in PT2E's spelling moves, is combined and cancels inside Inductor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed
from tests.support.frozen_inductor import freeze
from torch import nn
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from qfuse.inductor.moving import move_quantization
from qfuse.ir.events import EventLog, Fired

ops = torch.ops.quantized_decomposed
aten = torch.ops.aten
PARAMS = (0.05, 3, -128, 127, torch.int8)


class Movement(nn.Module):
    """A value that was dequantized is viewed and quantized again, by two readers."""

    def __init__(self, *again: Any) -> None:
        super().__init__()
        self.again = again or PARAMS

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q = ops.quantize_per_tensor(x.sin(), *PARAMS)
        real = ops.dequantize_per_tensor(q, *PARAMS)
        outs: list[torch.Tensor] = []
        for _ in range(2):
            moved = real.view(-1, 4).permute(1, 0)
            stored = ops.quantize_per_tensor(moved, *self.again)
            outs.append(ops.dequantize_per_tensor(stored, *self.again).relu() + len(outs))
        return tuple(outs)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_quantize_of_a_dequantize_behind_views_goes_away(*, frozen: bool) -> None:
    x = torch.randn(3, 8) * 10
    found = freeze(Movement(), x, freezing=frozen)
    assert found.report.fired["cancel-quantize"] >= 1
    assert found.report.fired["lift-quantize"] >= 1
    assert found.calls(ops.quantize_per_tensor.default) == 1
    for plain, merged in zip(found.plain, found.merged, strict=True):
        assert torch.equal(plain, merged)


@pytest.mark.parametrize(
    "again",
    [
        (0.04, 3, -128, 127, torch.int8),
        (0.05, 2, -128, 127, torch.int8),
        (0.05, 3, 0, 127, torch.int8),
        (0.05, 3, 0, 255, torch.uint8),
    ],
)
def test_other_parameters_stay(again: tuple[Any, ...]) -> None:
    x = torch.randn(3, 8) * 10
    found = freeze(Movement(*again), x)
    assert not found.report.fired["cancel-quantize"]
    assert found.calls(ops.quantize_per_tensor.default) == 2
    for plain, merged in zip(found.plain, found.merged, strict=True):
        assert torch.equal(plain, merged)


class Again(nn.Module):
    """All quantized values are dequantized and quantized again."""

    def __init__(self, *params: Any) -> None:
        super().__init__()
        self.params = params

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        real = ops.dequantize_per_tensor(q, *self.params)
        stored: torch.Tensor = ops.quantize_per_tensor(real, *self.params)
        return stored.float()


CODES = torch.arange(-128, 128).to(torch.int8)


@pytest.mark.parametrize(("scale", "zero"), [(0.1, 2**30), (1e37, 0), (1e-42, 0)])
def test_numbers_that_do_not_come_back_stay(scale: float, zero: int) -> None:
    found = freeze(Again(scale, zero, -128, 127, torch.int8), CODES)
    assert not found.report.fired["cancel-quantize"]
    assert not torch.equal(found.plain, CODES.float())
    assert torch.equal(found.plain, found.merged)


@pytest.mark.parametrize(("scale", "zero"), [(0.1, 1 << 16), (1e33, -(1 << 16)), (1.5e-38, 7)])
def test_numbers_that_come_back_at_the_edges(scale: float, zero: int) -> None:
    found = freeze(Again(scale, zero, -128, 127, torch.int8), CODES)
    assert found.report.fired["cancel-quantize"] == 1
    assert torch.equal(found.plain, CODES.float())
    assert torch.equal(found.merged, CODES.float())


def test_float8_is_left_alone() -> None:
    params = (0.1, 0, -448, 448, torch.float8_e4m3fn)
    q = torch.linspace(-3, 3, 16).to(torch.float8_e4m3fn)
    found = freeze(Again(*params), q)
    assert not found.report.fired["cancel-quantize"]
    assert torch.equal(found.plain, found.merged)


def named_graph() -> torch.fx.GraphModule:
    """Return a graph with every argument given by its name, in another order than the schema's."""
    graph = torch.fx.Graph()
    params: dict[str, Any] = {
        "dtype": torch.int8, "quant_max": 127, "quant_min": -128, "zero_point": 3, "scale": 0.05
    }  # fmt: skip
    x = graph.placeholder("x")
    q = graph.call_function(ops.quantize_per_tensor.default, (), {**params, "input": x})
    real = graph.call_function(
        ops.dequantize_per_tensor.default, (), {**params, "out_dtype": None, "input": q}
    )
    moved = graph.call_function(aten.view.default, (), {"size": [4, 6], "self": real})
    moved = graph.call_function(aten.transpose.int, (moved,), {"dim1": 1, "dim0": 0})
    again = graph.call_function(ops.quantize_per_tensor.default, (moved,), params)
    graph.output(graph.call_function(aten.neg.default, (again,)))
    module = torch.fx.GraphModule(nn.Module(), graph)
    FakeTensorProp(module).propagate(torch.randn(3, 8))
    return module


def test_arguments_by_name_are_kept() -> None:
    module, x, log = named_graph(), torch.randn(3, 8) * 10, EventLog()
    plain = module(x)
    move_quantization(module, {}, log)
    module.recompile()
    assert [event.rule for event in log.of(Fired)] == ["lift-quantize", "cancel-quantize"]
    assert torch.equal(module(x), plain)
