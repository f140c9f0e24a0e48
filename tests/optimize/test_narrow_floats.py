from __future__ import annotations

import pytest
import torch
from tests.optimize.epilogue_cases import calls

from qfuse.optimize.fuse_linear import FuseLinear
from qfuse.optimize.narrow_floats import NarrowFloats
from qfuse.rewrite.clone import clone
from qfuse.rewrite.driver import Context, apply_rules
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import QuantizedLinear
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten


@pytest.mark.numeric
def test_golden_a_float_linear_computes_in_bfloat16() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "m", 64)
    w = b.const("w", torch.randn(32, 64))
    program = b.done(b.call(aten.linear.default, x, w))
    source = clone(program)

    assert NarrowFloats().run(program, Context("optimize")).fired == {"narrow-floats": 1}

    assert calls(program) == ["aten._to_copy", "aten.linear", "aten._to_copy"]
    inputs = random_inputs(program, m=5)
    (new,), (old,) = run(program, inputs), run(source, inputs)
    error = (new - old).square().mean().sqrt() / old.square().mean().sqrt()
    assert 1e-5 < error < 2**-7, "it must round to bfloat16, and no further"


def test_one_cast_serves_an_operand_that_is_read_twice() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 4, 4)
    program = b.done(b.call(aten.mm.default, x, x))

    NarrowFloats().run(program, Context("optimize"))

    assert calls(program) == ["aten._to_copy", "aten.mm", "aten._to_copy"]


def test_refuses_other_types_and_other_ops() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 4, 4)
    wide = b.arg("wide", torch.float64, 4, 4)
    program = b.done(b.call(aten.add.Tensor, x, x), b.call(aten.mm.default, wide, wide))

    assert not NarrowFloats().run(program, Context("optimize")).modified


def test_quantized_linears_are_left_alone() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 4, 8)
    program = b.done(QuantizedLinear(b, 4, 8).linear(x))
    apply_rules(program, [FuseLinear()])

    assert not NarrowFloats().run(program, Context("optimize")).modified
