from __future__ import annotations

import pytest
import torch
from tests.support.cases.norm import Spelling, Writer, fused
from torch.fx import Node

from qfuse.ir.ops import library as ops
from qfuse.ir.quant.spec import QuantSpec

aten = torch.ops.aten
F32, BF16 = torch.float32, torch.bfloat16
LLAMA = Spelling(wide=F32, rounded=BF16, weight_dtype=BF16)

STORED: dict[str, QuantSpec] = {
    "int8 per-tensor": QuantSpec(torch.int8, -128, 127, (None, None)),
    "uint8 per-tensor": QuantSpec(torch.uint8, 0, 255, (None, None)),
    "int8 per-token": QuantSpec(torch.int8, -128, 127, (1, None)),
    "int8 in groups": QuantSpec(torch.int8, -128, 127, (1, 4)),
    "int16": QuantSpec(torch.int16, -300, 300, (None, None)),
}


def dequantized(w: Writer, name: str, spec: QuantSpec) -> Node:
    q = w.b.arg(name, spec.dtype, 5, 12)
    grid = [int(size) for size in spec.grid((5, 12))]
    scale, zero = torch.rand(grid) * 0.05 + 1e-2, torch.randint(0, 20, grid, dtype=torch.int32)
    return w.call(ops.dequantize, q, w.const(scale), w.const(zero), str(spec))


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("spelling", [Spelling(), Spelling(centre="once", bias=True)], ids=str)
@pytest.mark.parametrize("residual", ["none", "float", "quantized"])
def test_a_dequantize_in_front_is_part_of_the_op(
    name: str, spelling: Spelling, residual: str
) -> None:
    w = Writer(5, 12)
    x = dequantized(w, "q", STORED[name])
    other = dequantized(w, "r", STORED["uint8 per-tensor"]) if residual == "quantized" else w.x
    total = x if residual == "none" else w.call(aten.add.Tensor, x, other)
    norm = fused(w.done(w.dynamic(w.spelled(spelling, total)), w.call(aten.neg.default, total)))
    assert norm.x_params is not None
    assert norm.x_params.spec == STORED[name]
    assert (norm.residual_params is not None) == (residual == "quantized")
    assert (norm.residual is not None) == (residual != "none")


@pytest.mark.numeric
def test_a_dequantize_that_others_read_stays_for_them() -> None:
    w = Writer(5, 12)
    x = dequantized(w, "q", STORED["int8 per-tensor"])
    program = w.done(w.static(w.spelled(Spelling(), x)), w.call(aten.neg.default, x))
    norm = fused(program)
    assert norm.x.name == "q"
    assert ops.dequantize in {node.target for node in program.graph.nodes}


@pytest.mark.numeric
def test_a_cast_behind_the_dequantize_is_part_of_the_op() -> None:
    w = Writer(5, 12)
    spec = QuantSpec(torch.int8, -128, 127, (None, None), BF16)
    norm = fused(w.done(w.dynamic(w.spelled(LLAMA, dequantized(w, "q", spec)))))
    assert norm.x_params is not None
    assert (norm.x_params.spec.float_dtype, norm.norm.compute) == (BF16, F32)
