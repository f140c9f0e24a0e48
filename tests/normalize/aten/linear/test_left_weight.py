"""Quantized weights on the left of a product."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    calls,
    codes,
    finish,
    golden,
    refusal,
    scales,
)
from torch.fx import Node

from qfuse.cost import CostModel, CostProfile
from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.views import tensor_of
from qfuse.normalize import normalize
from qfuse.normalize.aten.linear.left_weight import SwapWeight
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rule import Miss
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_channel, per_tensor

F32 = torch.float32
RULE, TENSOR = SwapWeight(), str(per_tensor(2))


class Weight:
    """A graph with the quantized weight ``w`` of shape ``[n, 8]``."""

    def __init__(self, n: int = 5, k: int = 8, dtype: torch.dtype = F32) -> None:
        self.b = GraphBuilder()
        q, scale = self.b.const("w", codes(n, k)), self.b.const("t", scales(n, 1))
        spec = str(per_channel(2)).replace("float32 float32", f"{str(dtype)[6:]} float32", 1)
        self.w = self.b.call(ops.dequantize, q, scale, None, spec)
        self.dtype = dtype

    def x(self, *shape: int | str) -> Node:
        """Add an activation."""
        return self.b.arg("x", self.dtype, *shape)

    def done(self, y: Node) -> CapturedGraph:
        """Finish the graph."""
        return finish(self.b, y)


def test_golden_a_matrix() -> None:
    a = Weight()
    y = a.b.call(aten.mm.default, a.w, a.x(8, "m"))
    assert_expected_inline(
        golden(a.done(y), RULE),
        """\
const %w: int8[5, 8]
const %t: float32[5, 1]
%0 = qfuse.dequantize(%w, %t, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[5, 8]
%x: float32[8, s0]
%1 = aten.permute(%x, (1, 0)): float32[s0, 8]
%2 = aten.linear(%1, %0): float32[s0, 5]
%3 = aten.permute(%2, (1, 0)): float32[5, s0]
%4 = aten.clone(%3, memory_format=torch.contiguous_format): float32[5, s0]
return (%4)
fired: swap-weight 1""",
    )


def test_golden_an_activation_that_is_transposed() -> None:
    a = Weight()
    x = a.b.call(aten.transpose.int, a.x(2, 3, 8), -1, -2)
    y = a.b.call(aten.matmul.default, a.w, x)
    assert_expected_inline(
        golden(a.done(y), RULE),
        """\
const %w: int8[5, 8]
const %t: float32[5, 1]
%0 = qfuse.dequantize(%w, %t, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[5, 8]
%x: float32[2, 3, 8]
%1 = aten.linear(%x, %0): float32[2, 3, 5]
%2 = aten.permute(%1, (0, 2, 1)): float32[2, 5, 3]
%3 = aten.clone(%2, memory_format=torch.contiguous_format): float32[2, 5, 3]
return (%3)
fired: swap-weight 1""",
    )


def _expanded(a: Weight) -> Node:
    wide = a.b.call(aten.expand.default, a.b.call(aten.unsqueeze.default, a.w, 0), [3, 5, 8])
    return a.b.call(aten.bmm.default, wide, a.x(3, 8, 4))


Build = Callable[[Weight], Node]
SPELLINGS: dict[str, Build] = {
    "mm": lambda a: a.b.call(aten.mm.default, a.w, a.x(8, 4)),
    "matmul": lambda a: a.b.call(aten.matmul.default, a.w, a.x(8, 4)),
    "batched": lambda a: a.b.call(aten.matmul.default, a.w, a.x(3, 8, 4)),
    "two batch axes": lambda a: a.b.call(aten.matmul.default, a.w, a.x(2, 3, 8, 4)),
    "one column": lambda a: a.b.call(aten.matmul.default, a.w, a.x(3, 8, 1)),
    "bmm": _expanded,
    "addmm": lambda a: a.b.call(
        aten.addmm.default, a.b.const("bias", torch.randn(5, 1, dtype=a.dtype)), a.w, a.x(8, 4)
    ),
}


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name: str, dtype: torch.dtype) -> None:
    a = Weight(dtype=dtype)
    y = SPELLINGS[name](a)
    (x,) = a.b.graph.find_nodes(op="placeholder")
    program = a.done(y)
    strides = tensor_of(y).stride()

    result = assert_same_values(program, [torch.randn(tensor_of(x).shape, dtype=dtype)], RULE)
    assert result.fired == {RULE.name: 1}
    assert "aten.linear" in calls(program)
    (new,) = program.graph.output_node().all_input_nodes
    assert tensor_of(new).stride() == strides


@pytest.mark.numeric
def test_a_weight_that_is_transposed() -> None:
    a = Weight(8, 5)
    y = a.b.call(aten.mm.default, a.b.call(aten.t.default, a.w), a.x(8, 4))
    program = a.done(y)

    assert_same_values(program, [torch.randn(8, 4)], RULE)
    (linear,) = program.graph.find_nodes(op="call_function", target=aten.linear.default)
    assert linear.args[1].target is ops.dequantize


@pytest.mark.numeric
def test_a_weight_that_is_only_cast() -> None:
    b = GraphBuilder()
    w = b.call(aten._to_copy.default, b.const("w", codes(5, 8)), dtype=F32)
    y = b.call(aten.mm.default, w, b.arg("x", F32, 8, 4))
    program = finish(b, b.call(aten.mul.Tensor, y, b.const("s", scales(5, 1))))

    assert_same_values(program, [torch.randn(8, 4)], RULE)
    left = calls(normalize(program))
    assert "qfuse.dequantize" in left
    assert "aten.mm" not in left


@pytest.mark.numeric
def test_a_quantized_activation() -> None:
    a = Weight()
    one = a.b.const("one", torch.full((1, 1), 0.05))
    x = a.b.call(ops.dequantize, a.b.arg("q", torch.int8, 8, 4), one, None, TENSOR)
    program = a.done(a.b.call(aten.mm.default, a.w, x))

    assert_same_values(program, [codes(8, 4)], RULE)
    assert calls(program).count("qfuse.dequantize") == 2


def _factors(a: Weight) -> Node:
    bias = a.b.const("bias", torch.randn(5, 1))
    return a.b.call(aten.addmm.default, bias, a.w, a.x(8, 4), alpha=0.5)


def _residual(a: Weight) -> Node:
    return a.b.call(aten.addmm.default, a.b.const("r", torch.randn(4)), a.w, a.x(8, 4))


def _repeated(a: Weight) -> Node:
    wide = a.b.call(aten.expand.default, a.b.call(aten.unsqueeze.default, a.w, 0), [3, 5, 8])
    return a.b.call(aten.matmul.default, wide, a.x(1, 8, 4))


REFUSALS: dict[str, tuple[MissCode, Build]] = {
    "factors": (MissCode.ARGUMENT, _factors),
    "a summand per column": (MissCode.SHAPE, _residual),
    "an activation that is repeated": (MissCode.SHAPE, _repeated),
    "a vector": (MissCode.SHAPE, lambda a: a.b.call(aten.matmul.default, a.w, a.x(8))),
    "a float weight": (
        MissCode.PATTERN,
        lambda a: a.b.call(aten.mm.default, a.b.const("f", torch.randn(5, 8)), a.x(8, 4)),
    ),
    "a weight on the right": (
        MissCode.PATTERN,
        lambda a: a.b.call(aten.mm.default, a.x(3, 5), a.w),
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses(name: str) -> None:
    code, build = REFUSALS[name]
    a = Weight()
    assert refusal(a.done(build(a)), RULE)[0] is code


@pytest.mark.parametrize("quantized", [True, False])
def test_refuses_transposes_that_cost_more_than_they_save(quantized: bool) -> None:
    a = Weight(256, 256)
    x = a.x(256, 64)
    if quantized:
        one = a.b.const("one", torch.full((1, 1), 0.05))
        x = a.b.call(ops.dequantize, a.b.arg("q", torch.int8, 256, 64), one, None, TENSOR)
    y = a.b.call(aten.mm.default, a.w, x)
    program = a.done(y)

    assert not isinstance(RULE.match(y), Miss)
    context = RewriteContext("normalize", cost=CostModel(CostProfile.pinned()))
    result = apply_rules(program, [RULE], context)
    assert bool(result.fired) is quantized
    assert [miss.code for _, miss in result.misses] == [] if quantized else [MissCode.PROFIT]
