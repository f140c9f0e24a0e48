from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.matmul import as_fused_matmul
from qfuse.optimize import optimize
from qfuse.optimize.spell.product_sum import SpellProductSum
from qfuse.rewrite.clone import clone
from qfuse.testing.build import GraphBuilder
from qfuse.testing.rules import assert_same_values, golden, refusal
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten
F32 = torch.float32


def dequantized(b: GraphBuilder, name: str, *shape: int | str) -> Node:
    """Return 8-bit values that are passed in, with one scale."""
    q = b.arg(name, torch.int8, *shape)
    rank = len(shape)
    scale = b.const(f"{name}_scale", torch.full((1,) * rank, 0.03))
    block = "x".join("*" * rank)
    spec = f"int8[-128,127] {block} float32 float32:reciprocal:round-zp none"
    return b.call(ops.dequantize, q, scale, None, spec)


def source(
    *,
    x: tuple[int | str, ...] = ("t", 1, 8),
    w: tuple[int | str, ...] = ("t", 5, 8),
    axes: tuple[int, ...] = (-1,),
    keep: bool = False,
    swapped: bool = False,
    plain: bool = False,
) -> NormalGraph:
    """Return a sum of products of a weight per token and a token."""
    b = GraphBuilder()
    many = dequantized(b, "w", *w)
    row = b.arg("x", F32, *x) if plain else dequantized(b, "x", *x)
    product = b.call(aten.mul.Tensor, *((row, many) if swapped else (many, row)))
    return b.done(b.call(aten.sum.dim_IntList, product, list(axes), keep))


def test_golden_a_weight_per_token() -> None:
    assert_expected_inline(
        golden(source(), SpellProductSum()),
        """\
%w: int8[s0, 5, 8]
const %w_scale: float32[1, 1, 1]
%0 = qfuse.dequantize(%w, %w_scale, None, 'int8[-128,127] *x*x* float32 float32:reciprocal:round-zp none'): float32[s0, 5, 8]
%x: int8[s0, 1, 8]
const %x_scale: float32[1, 1, 1]
%1 = qfuse.dequantize(%x, %x_scale, None, 'int8[-128,127] *x*x* float32 float32:reciprocal:round-zp none'): float32[s0, 1, 8]
%2 = aten.transpose.int(%1, -2, -1): float32[s0, 8, 1]
%3 = aten.matmul(%0, %2): float32[s0, 5, 1]
%4 = aten.squeeze.dim(%3, -1): float32[s0, 5]
return (%4)
fired: spell-product-sum 1""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("lead", [("t",), (2, 3), ()], ids=str)
def test_values_and_strides(lead: tuple[int | str, ...], swapped: bool) -> None:
    program = source(x=(*lead, 1, 8), w=(*lead, 5, 8), axes=(len(lead) + 1,), swapped=swapped)
    before = clone(program)
    inputs = random_inputs(program, t=7)
    done = optimize(clone(program))
    assert any(as_fused_matmul(node) for node in done.graph.nodes)
    (got,), (want,) = run(done, inputs), run(before, inputs)
    assert (got.shape, got.stride()) == (want.shape, want.stride())
    assert_same_values(program, inputs, SpellProductSum())


def test_refuses_a_float_factor() -> None:
    code, at = refusal(source(plain=True), SpellProductSum())
    assert (code, at) == (MissCode.NOT_QUANTIZED, "x")


@pytest.mark.parametrize(("axes", "keep"), [((-2,), False), ((-1,), True), ((1, 2), False)])
def test_refuses_other_sums(axes: tuple[int, ...], keep: bool) -> None:
    assert refusal(source(axes=axes, keep=keep), SpellProductSum())[0] is MissCode.AXIS


def test_refuses_other_factors() -> None:
    assert refusal(source(x=("t", 5, 8)), SpellProductSum())[0] is MissCode.PATTERN
    assert refusal(source(x=(8,)), SpellProductSum())[0] is MissCode.PATTERN


def test_refuses_products_with_other_users() -> None:
    b = GraphBuilder()
    product = b.call(aten.mul.Tensor, dequantized(b, "w", 3, 5, 8), dequantized(b, "x", 3, 1, 8))
    program = b.done(b.call(aten.sum.dim_IntList, product, [-1]), product)
    assert refusal(program, SpellProductSum())[0] is MissCode.SHARED
