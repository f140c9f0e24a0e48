from __future__ import annotations

import torch
from tests.support.sources.dialects import equal_but_for_nan

from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops import library as ops
from qfuse.passes import CancelQuantize
from qfuse.rewrite.clone import clone
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten
SPEC = "int8[-128,127] * float32 float32:reciprocal:round-zp int"


def test_equal_quantizes_of_one_value_are_all_cancelled() -> None:
    b = GraphBuilder()
    scale = b.const("s", torch.tensor([0.1]))
    q = b.call(ops.quantize, b.arg("x", torch.float32, 4), scale, None, SPEC)
    y = b.call(ops.dequantize, q, scale, None, SPEC)
    again = [b.call(ops.quantize, y, scale, None, SPEC) for _ in range(3)]
    outs = [b.call(ops.dequantize, n, scale, None, SPEC) for n in again]
    program = b.done(*(b.call(aten.neg.default, out) for out in outs))
    source = clone(program)

    assert CancelQuantize()(program.module).modified
    assert sum(is_call(node, ops.quantize) for node in program.graph.nodes) == 1
    inputs = random_inputs(source)
    assert all(map(equal_but_for_nan, run(program, inputs), run(source, inputs)))
    assert not CancelQuantize()(program.module).modified
