from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import assert_same_values, aten, finish, golden, refusal
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.normalize.aten.views.sink_transpose import SinkTranspose
from qfuse.testing.build import GraphBuilder

WEIGHT = torch.randint(-127, 128, (8, 6), dtype=torch.int8)


def product(b: GraphBuilder, rows: int | str = 4) -> Node:
    """The transpose of a product of integers, of shape [6, rows]."""
    x = b.arg("x", torch.int8, rows, 8)
    left, right = (
        b.call(aten._to_copy.default, n, dtype=torch.int32) for n in (x, b.const("w", WEIGHT))
    )
    return b.call(aten.t.default, b.call(aten.mm.default, left, right))


def scaled(b: GraphBuilder, y: Node, rows: int | str = 4) -> Node:
    real = b.call(aten._to_copy.default, y, dtype=torch.float32)
    real = b.call(aten.mul.Tensor, real, b.const("column", torch.rand(6, 1)))
    real = b.call(aten.mul.Tensor, b.arg("row", torch.float32, rows), real)
    return b.call(aten.mul.Tensor, real, 0.5)


def test_golden_factors_are_transposed() -> None:
    b = GraphBuilder()
    assert_expected_inline(
        golden(finish(b, scaled(b, product(b, "n"), "n")), SinkTranspose()),
        """\
%x: int8[s0, 8]
const %w: int8[8, 6]
%0 = aten._to_copy(%x, dtype=int32): int32[s0, 8]
%1 = aten._to_copy(%w, dtype=int32): int32[8, 6]
%2 = aten.mm(%0, %1): int32[s0, 6]
%3 = aten._to_copy(%2, dtype=float32): float32[s0, 6]
const %column: float32[6, 1]
%4 = aten.t(%column): float32[1, 6]
%5 = aten.mul.Tensor(%3, %4): float32[s0, 6]
%row: float32[s0]
%6 = aten.unsqueeze(%row, 1): float32[s0, 1]
%7 = aten.mul.Tensor(%5, %6): float32[s0, 6]
%8 = aten.mul.Tensor(%7, 0.5): float32[s0, 6]
%9 = aten.t(%8): float32[6, s0]
return (%9)
fired: sink-transpose 4""",
    )


def test_refuses_a_matrix() -> None:
    b = GraphBuilder()
    real = b.call(aten.mul.Tensor, product(b), b.arg("m", torch.float32, 6, 4))
    assert refusal(finish(b, real), SinkTranspose())[0] is MissCode.SHAPE


def test_refuses_what_is_no_product_and_does_not_report_it() -> None:
    b = GraphBuilder()
    x = b.call(aten.t.default, b.arg("x", torch.float32, 4, 6))
    y = b.call(aten.mul.Tensor, x, b.arg("s", torch.float32, 6, 1))
    program = finish(b, y)
    assert refusal(program, SinkTranspose())[0] is MissCode.PATTERN


@pytest.mark.numeric
@pytest.mark.parametrize("rows", [1, 6, 7])
def test_values_are_the_same_bits(rows: int) -> None:
    b = GraphBuilder()
    program = finish(b, scaled(b, product(b, rows), rows))
    inputs = [torch.randint(-128, 128, (rows, 8), dtype=torch.int8), torch.rand(rows)]
    fired = assert_same_values(program, inputs, SinkTranspose(), exact=True).fired
    assert fired == {"sink-transpose": 4}
