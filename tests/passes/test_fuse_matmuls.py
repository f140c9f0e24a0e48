"""The pass that fuses products of two activations, on a graph of PT2E."""

from __future__ import annotations

import importlib

import pytest
import torch
from tests.support.graphs.raw_fx import assert_same_bits, bits_of
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from qfuse.ir.ops.matmul import as_fused_matmul
from qfuse.passes import FuseLinears, FuseMatmuls, SinkDequantize

importlib.import_module("torch.ao.quantization.fx._decomposed")
decomposed = torch.ops.quantized_decomposed
RANGE = (-128, 127, torch.int8)


def traced() -> tuple[GraphModule, list[torch.Tensor]]:
    """Return scaled products of quantized queries and keys, quantized, and their inputs."""

    def call(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        left, right = (
            decomposed.dequantize_per_tensor(
                decomposed.quantize_per_tensor(value, 0.05, zero, *RANGE), 0.05, zero, *RANGE
            )
            for value, zero in ((x, 3), (k, -7))
        )
        y = torch.matmul(left, right.transpose(-1, -2)) / 8.0
        q = decomposed.quantize_per_tensor(y, 0.04, -5, *RANGE)
        assert isinstance(q, torch.Tensor)
        return q

    inputs = [torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8)]
    return make_fx(call, pre_dispatch=True)(*inputs), inputs


@pytest.mark.numeric
def test_a_product_from_inputs_to_quantized_result() -> None:
    module, inputs = traced()
    before = bits_of(module, inputs)
    assert not FuseLinears()(module).modified
    # The transpose is between the dequantize and the product.
    assert not FuseMatmuls()(module).modified
    assert SinkDequantize()(module).modified
    outcome = FuseMatmuls()(module)

    assert outcome.fired["fuse-matmul"] == 1
    assert (outcome.fired["fuse-mul"], outcome.fired["fuse-output-quantize"]) == (1, 1)
    (fused,) = [view for n in module.graph.nodes if (view := as_fused_matmul(n))]
    assert str(fused.epilogue) == "mul(0)"
    assert fused.out_params is not None
    assert_same_bits(before, bits_of(module, inputs))
    assert not FuseMatmuls()(module).modified
