from __future__ import annotations

import pytest
import torch

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.ops import library as ops
from qfuse.optimize.match.float_side import refuse_float_side
from qfuse.testing.build import GraphBuilder

aten = torch.ops.aten
F32 = torch.float32


def experts(lookup: str, *, constant: bool) -> NormalGraph:
    """Return a product of one weight per token with a float activation."""
    b = GraphBuilder()
    x, ids = b.arg("x", F32, 6, 16, 1), b.arg("ids", torch.int64, 6)
    i8 = torch.int8
    table = b.const("w", torch.ones(4, 24, 16, dtype=i8)) if constant else b.arg("w", i8, 4, 24, 16)
    if lookup == "index":
        q = b.call(aten.index.Tensor, table, [ids])
    else:
        q = b.call(aten.index_select.default, table, 0, ids)
    scale = b.const("scale", torch.ones(1, 1, 1))
    spec = "int8[-128,127] *x*x* float32 float32:divide:round-zp int"
    w = b.call(ops.dequantize, q, scale, None, spec)
    return b.done(b.call(aten.bmm.default, w, x))


@pytest.mark.parametrize("lookup", ["index", "index_select"])
def test_weights_that_are_looked_up_are_named(lookup: str) -> None:
    program = experts(lookup, constant=True)
    (product,) = (n for n in program.graph.nodes if n.target is aten.bmm.default)
    w, x = product.all_input_nodes
    miss = refuse_float_side("right", x, w)

    assert (miss.code, miss.at.name) == (MissCode.NOT_QUANTIZED, "x")
    assert miss.reason == (
        "its weights are looked up in %w for each row, and no kernel multiplies float activations "
        "by such weights: quantize the activations too"
    )


def test_a_table_that_is_passed_in_is_an_activation() -> None:
    program = experts("index", constant=False)
    (product,) = (n for n in program.graph.nodes if n.target is aten.bmm.default)
    w, x = product.all_input_nodes
    miss = refuse_float_side("right", x, w)
    assert miss.reason == "the right operand is torch.float32, the other one is quantized"
