"""The passes that move quantization, on graphs of PT2E and torchao."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from tests.support.graphs.raw_fx import assert_same_bits, bits_of, check_values, ops_of
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.infra.pass_manager import PassManager

from qfuse.passes import (
    CancelQuantize,
    FuseLinears,
    LiftCombineQuantize,
    MergeLinears,
    SinkDequantize,
)

importlib.import_module("torch.ao.quantization.fx._decomposed")
decomposed = torch.ops.quantized_decomposed
aten = torch.ops.aten
RANGE = (-128, 127, torch.int8)


def traced(scale: float = 0.05, other: float = 0.05) -> tuple[GraphModule, list[torch.Tensor]]:
    """Return two quantized linears behind a view and a norm, and inputs."""
    weights = [torch.randint(-127, 128, (n, 16)).to(torch.int8) for n in (4, 6)]

    def call(x: torch.Tensor) -> list[torch.Tensor]:
        h, outs = torch.sigmoid(x), []
        for weight, step in zip(weights, (scale, other), strict=True):
            q = decomposed.quantize_per_tensor(h.view(-1, 16), step, 3, *RANGE)
            real = decomposed.dequantize_per_tensor(q, step, 3, *RANGE)
            stored = decomposed.dequantize_per_tensor(weight, 0.01, 0, *RANGE)
            outs.append(torch.relu(torch.nn.functional.linear(real, stored)))
        return outs

    x = torch.randn(2, 3, 16)
    return make_fx(call)(x), [x]


@pytest.mark.numeric
def test_quantizes_rise_and_become_one() -> None:
    module, inputs = traced()
    before = bits_of(module, inputs)
    outcome = LiftCombineQuantize()(module)

    assert outcome.fired == {"lift-quantize": 1, "combine": 2}
    assert ops_of(module)["qfuse.quantize"] == 1
    (quantize,) = module.graph.find_nodes(
        op="call_function", target=torch.ops.qfuse.quantize.default
    )
    assert quantize.args[0].target is aten.sigmoid.default
    # The weights were no matter, so they are spelled as they were.
    assert ops_of(module)["quantized_decomposed.dequantize_per_tensor"] >= 2
    assert_same_bits(before, bits_of(module, inputs))
    check_values(module, *inputs)
    assert not LiftCombineQuantize()(module).modified


@pytest.mark.numeric
def test_scales_that_differ_rise_apart() -> None:
    module, inputs = traced(0.05, 0.04)
    before = bits_of(module, inputs)
    outcome = LiftCombineQuantize()(module)

    assert outcome.fired == {"lift-quantize": 2}
    assert ops_of(module)["qfuse.quantize"] == 2
    assert_same_bits(before, bits_of(module, inputs))


@pytest.mark.numeric
def test_passes_in_a_row_and_in_a_pass_manager() -> None:
    module, inputs = traced()
    before = bits_of(module, inputs)
    outcomes = [
        kind()(module)
        for kind in (LiftCombineQuantize, MergeLinears, SinkDequantize, CancelQuantize)
    ]

    assert [outcome.modified for outcome in outcomes] == [True, True, False, False]
    assert ops_of(module)["aten.mm"] == 1
    assert_same_bits(before, bits_of(module, inputs))
    assert FuseLinears()(module).fired["fuse-linear"] == 1
    assert ops_of(module)["qfuse.linear"] == 1
    assert_same_bits(before, bits_of(module, inputs))
    check_values(module, *inputs)
    # Fused linears are nothing to merge, and in nobody's way.
    assert not MergeLinears()(module).modified

    other, _ = traced()
    passes: list[Any] = [LiftCombineQuantize(), MergeLinears()]
    result = PassManager(passes=passes)(other)
    assert result.modified
    assert ops_of(result.graph_module)["aten.mm"] == 1


@pytest.mark.numeric
def test_dequantizes_sink_and_cancel() -> None:
    def call(q: torch.Tensor) -> Any:
        real = decomposed.dequantize_per_tensor(q, 0.05, 3, *RANGE)
        turned = real.permute(1, 0)
        return decomposed.quantize_per_tensor(turned, 0.05, 3, *RANGE) + 1

    q = torch.randint(-128, 128, (4, 6)).to(torch.int8)
    module = make_fx(call)(q)
    expected = module(q)
    alone = SinkDequantize()(module)
    outcome = CancelQuantize()(module)

    assert alone.fired == {"sink-dequantize": 1}
    assert outcome.fired == {"cancel-quantize": 1}
    assert dict(ops_of(module)) == {"aten.permute": 1, "aten.add.Tensor": 1}
    assert_same_bits([expected], [module(q)])


def test_a_graph_without_quantization_is_left_alone() -> None:
    module = make_fx(lambda x: x.view(-1) + x.view(-1))(torch.randn(3, 2))
    graph = module.graph
    for kind in (LiftCombineQuantize, SinkDequantize, CancelQuantize, FuseLinears, MergeLinears):
        assert str(kind()(module)) == "fired: nothing"
    assert module.graph is graph
