from __future__ import annotations

import math

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.fold import PRODUCTS, N, Product, check_folded
from tests.support.sources.aten_spellings import golden, refusal
from torch.fx.node import Argument

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.optimize.fold.scale import FoldScale
from qfuse.optimize.fold.shift import FoldShift
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rule import Miss
from qfuse.testing.build import GraphBuilder

aten = torch.ops.aten
ADD, SUB = aten.add.Tensor, aten.sub.Tensor


def shifted(
    product: Product,
    summand: torch.Tensor | float,
    op: torch._ops.OpOverload = ADD,
    **kwargs: Argument,
) -> NormalGraph:
    """A product plus a constant."""
    b = GraphBuilder()
    y = product.node(b)
    c = b.const("c", summand) if isinstance(summand, torch.Tensor) else summand
    return b.done(b.call(op, y, c, **kwargs))


def test_golden_a_summand_per_channel() -> None:
    program = shifted(Product("linear", bias=False), torch.rand(N))

    assert_expected_inline(
        golden(program, FoldShift()),
        """\
%x: float32[s0, 4]
const %w_s: float32[6, 1]
const %w: int8[6, 4]
%0 = qfuse.dequantize(%w, %w_s, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[6, 4]
const %w_bias: float32[6]
%1 = aten.linear(%x, %0, %w_bias): float32[s0, 6]
return (%1)
fired: fold-shift 1""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("product", PRODUCTS, ids=str)
@pytest.mark.parametrize("op", [ADD, SUB])
def test_values_agree(product: Product, op: torch._ops.OpOverload) -> None:
    found = check_folded(shifted(product, product.wide(torch.randn(N)), op, alpha=1.5), FoldShift())
    assert (found.params.spec.block[product.axis] == 1) == product.channels
    check_folded(shifted(product, 0.3, op), FoldShift())


@pytest.mark.numeric
def test_a_constant_on_the_left() -> None:
    b = GraphBuilder()
    y = Product().node(b)
    check_folded(b.done(b.call(ADD, b.const("c", torch.rand(N, 1, 1)), y)), FoldShift())


@pytest.mark.numeric
def test_factors_and_summands_in_turn() -> None:
    b = GraphBuilder()
    y = b.call(ADD, b.call(aten.mul.Tensor, b.call(ADD, Product().node(b), 1.0), 0.5), 2)
    program = b.done(y)

    assert apply_rules(program, [FoldScale(), FoldShift()]).fired == {
        "fold-scale": 1,
        "fold-shift": 2,
    }


@pytest.mark.parametrize(("op", "alpha"), [(SUB, 1), (ADD, 2)])
def test_refuses_a_factor_of_the_product(op: torch._ops.OpOverload, alpha: int) -> None:
    b = GraphBuilder()
    y = Product().node(b)
    program = b.done(b.call(op, b.const("c", torch.rand(N, 1, 1)), y, alpha=alpha))

    assert refusal(program, FoldShift())[0] is MissCode.ARGUMENT


@pytest.mark.parametrize(
    ("summand", "code"),
    [
        (math.inf, MissCode.RANGE),
        (torch.rand(5, 3), MissCode.AXIS),
        (torch.zeros(N, 1, 1, dtype=torch.float64), MissCode.DTYPE),
        (torch.zeros(N, 1, 1, dtype=torch.bool), MissCode.DTYPE),
    ],
)
def test_refuses_other_summands(summand: torch.Tensor | float, code: MissCode) -> None:
    assert refusal(shifted(Product(), summand), FoldShift())[0] is code


def test_refuses_a_product_added_to_itself() -> None:
    b = GraphBuilder()
    y = Product().node(b)
    miss = FoldShift().match(b.call(ADD, y, y))

    assert isinstance(miss, Miss)
    assert (miss.code, miss.progress) == (MissCode.NOT_CONSTANT, 0)


def test_refuses_other_users() -> None:
    b = GraphBuilder()
    y = Product().node(b)

    assert refusal(b.done(b.call(ADD, y, 2.0), y), FoldShift()) == (MissCode.SHARED, y.name)
