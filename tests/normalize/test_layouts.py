"""Inputs of every layout: the normal graph gives the values, and the strides, of the source."""

from __future__ import annotations

import pytest
import torch
from tests.support.sources.dialects import Source, assert_same_bits, codes, ops_of, scales
from torch.fx import Node

d = torch.ops.quantized_decomposed
ao = torch.ops.torchao
aten = torch.ops.aten

LAYOUTS = ("dense", "transposed", "sliced", "expanded")
FULL = (-128, 127, torch.int8)


def laid_out(source: Source, layout: str, values: torch.Tensor) -> Node:
    """An input of shape (6, 8) whose memory is laid out in a way of its own."""
    b = source.b
    match layout:
        case "transposed":
            return b.call(aten.t.default, source.arg(values.t().contiguous()))
        case "sliced":
            wide = source.arg(values.repeat_interleave(2, 1))
            return b.call(aten.slice.Tensor, wide, 1, 0, 16, 2)
        case "expanded":
            return b.call(aten.expand.default, source.arg(values[:1]), [6, 8])
        case _:
            return source.arg(values)


@pytest.mark.numeric
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", ["tensor", "channel", "token", "affine-token", "affine-tensor"])
def test_quantizes_and_dequantizes(op: str, layout: str) -> None:
    source = Source()
    x = laid_out(source, layout, torch.randn(6, 8))
    q = laid_out(source, layout, codes((6, 8), torch.int8))
    grid = (1,) if op.endswith("tensor") else (6, 1)
    s = source.b.const("s", scales(grid))
    z = source.b.const("z", torch.full(grid, 3, dtype=torch.int64))
    call = source.b.call
    match op:
        case "tensor":
            outs = (
                call(d.quantize_per_tensor.tensor, x, s, z, *FULL),
                call(d.dequantize_per_tensor.tensor, q, s, z, *FULL),
            )
        case "channel":
            outs = (
                call(d.quantize_per_channel.default, x, s, z, 0, *FULL),
                call(d.dequantize_per_channel.default, q, s, z, 0, *FULL),
            )
        case "token":
            outs = (
                call(d.quantize_per_token.default, x, s, z, *FULL),
                call(d.dequantize_per_token.default, q, s, z, *FULL, torch.float32),
            )
        case _:
            block = [6, 8] if op.endswith("tensor") else [1, 8]
            outs = (
                call(ao.quantize_affine.default, x, block, s, z, torch.int8),
                call(ao.dequantize_affine.default, q, block, s, z, torch.int8),
            )

    assert ops_of(assert_same_bits(source, *outs)) == ["quantize", "dequantize"]
