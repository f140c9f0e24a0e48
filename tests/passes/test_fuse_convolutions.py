"""The pass that fuses convolutions, on a graph of PT2E."""

from __future__ import annotations

import importlib

import pytest
import torch
from tests.support.graphs.raw_fx import assert_same_bits, bits_of, ops_of
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from qfuse.ir.ops.convolution import as_fused_convolution
from qfuse.passes import FuseConvolutions, FuseLinears

importlib.import_module("torch.ao.quantization.fx._decomposed")
decomposed = torch.ops.quantized_decomposed
RANGE = (-128, 127, torch.int8)


def traced(padding: str | int) -> tuple[GraphModule, list[torch.Tensor]]:
    """Return a quantized convolution with a relu and a quantized result, and its input."""
    weight = torch.randint(-127, 128, (6, 4, 2, 3)).to(torch.int8)
    scales, zeros = torch.rand(6) * 0.01 + 1e-3, torch.zeros(6, dtype=torch.int64)

    def call(x: torch.Tensor) -> torch.Tensor:
        q = decomposed.quantize_per_tensor(x, 0.05, 3, *RANGE)
        real = decomposed.dequantize_per_tensor(q, 0.05, 3, *RANGE)
        stored = decomposed.dequantize_per_channel(weight, scales, zeros, 0, *RANGE)
        y = torch.relu(torch.nn.functional.conv2d(real, stored, padding=padding))
        q = decomposed.quantize_per_tensor(y, 0.04, -128, *RANGE)
        assert isinstance(q, torch.Tensor)
        return q

    x = torch.randn(2, 4, 6, 5)
    return make_fx(call, pre_dispatch=True)(x), [x]


@pytest.mark.numeric
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("padding", [0, 1, "same"])
def test_a_convolution_from_input_to_quantized_result(padding: str | int) -> None:
    module, inputs = traced(padding)
    before = bits_of(module, inputs)
    assert not FuseLinears()(module).modified
    outcome = FuseConvolutions()(module)

    assert outcome.fired["fuse-convolution"] == 1
    assert (outcome.fired["fuse-activation"], outcome.fired["fuse-output-quantize"]) == (1, 1)
    assert ops_of(module)["aten.constant_pad_nd"] == (padding == "same")
    (fused,) = [view for n in module.graph.nodes if (view := as_fused_convolution(n))]
    assert str(fused.epilogue) == "act(relu)"
    assert fused.out_params is not None
    assert_same_bits(before, bits_of(module, inputs))
    assert not FuseConvolutions()(module).modified
