from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.norm import Writer, assert_lowered_alike
from tests.support.cases.propagate import applied, only_miss
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.spec import QuantSpec
from qfuse.optimize.fuse.stored_softmax import FuseStoredSoftmax
from qfuse.rewrite.clone import clone

aten = torch.ops.aten


def dequantized(w: Writer) -> Node:
    spec = QuantSpec(torch.uint8, 0, 255, (None, None, None))
    q = w.b.arg("q", torch.uint8, *w.shape)
    scale, zero = w.const(torch.full((1, 1, 1), 0.07)), w.const(torch.full((1, 1, 1), 9).int())
    return w.call(ops.dequantize, q, scale, zero, str(spec))


def masked(w: Writer, x: Node, how: str) -> Node:
    if how == "added":
        return w.call(aten.add.Tensor, x, w.const(torch.randn(5, 7)))
    if how == "filled":
        return w.call(aten.masked_fill.Scalar, x, w.const(torch.rand(5, 7) > 0.7), -1e9)
    return x


def test_golden() -> None:
    w = Writer("m", 5, 7)
    program = w.done(w.call(aten.softmax.int, masked(w, dequantized(w), "added"), -1))
    found = applied(program, FuseStoredSoftmax, context=None, m=3)
    assert found.fired == {"fuse-stored-softmax": 1}
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, 5, 7]
%q: uint8[s0, 5, 7]
const %c1: float32[1, 1, 1]
const %c2: int32[1, 1, 1]
const %c3: float32[5, 7]
%0 = qfuse.softmax(%q, %c1, %c2, 'uint8[0,255] *x*x* float32 float32:reciprocal:round-zp int', %c3, 'axis=-1 float32:float32', None, None, '', '', ''): (float32[s0, 5, 7])
%1 = getitem(%0, 0): float32[s0, 5, 7]
return (%1)""",
    )


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("how", ["none", "added", "filled"])
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_bits_stay(how: str, axis: int, dtype: torch.dtype | None) -> None:
    w = Writer("m", 5, 7)
    y = w.call(aten.softmax.int, masked(w, dequantized(w), how), axis, dtype)
    program = w.done(w.call(aten.neg.default, y))
    source = clone(program)
    found = applied(program, FuseStoredSoftmax, context=None, m=3)
    assert found.fired == {"fuse-stored-softmax": 1}
    assert_lowered_alike(program, source, m=3)


def test_a_float_input_is_no_near_miss() -> None:
    w = Writer("m", 5, 7)
    program = w.done(w.call(aten.softmax.int, w.x, -1))
    assert not applied(program, FuseStoredSoftmax, context=None, m=3).modified


def test_refuses_a_result_of_another_layout() -> None:
    w = Writer(3, 5, 7)
    x = dequantized(w)
    q = w.call(aten.permute.default, x.args[0], [2, 0, 1])
    x = w.call(ops.dequantize, q, *x.args[1:])
    miss = only_miss(w.done(w.call(aten.softmax.int, x, -1)), FuseStoredSoftmax, context=None)
    assert miss.code is MissCode.SHAPE
