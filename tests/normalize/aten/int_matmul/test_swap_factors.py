from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import assert_same_values, aten, finish, golden, refusal
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.normalize.aten.int_matmul.swap_factors import SwapFactors
from qfuse.testing.build import GraphBuilder

WEIGHT = torch.randint(-127, 128, (6, 8), dtype=torch.int8)


def swapped(b: GraphBuilder, rows: int | str, dtype: torch.dtype = torch.int8) -> Node:
    x = b.call(aten.t.default, b.arg("x", dtype, rows, 8))
    left, right = (
        b.call(aten._to_copy.default, n, dtype=torch.int32) for n in (b.const("w", WEIGHT), x)
    )
    return b.call(aten.mm.default, left, right)


def test_golden_the_weight_is_on_the_right() -> None:
    b = GraphBuilder()
    assert_expected_inline(
        golden(finish(b, swapped(b, "n")), SwapFactors()),
        """\
%x: int8[s0, 8]
%0 = aten._to_copy(%x, dtype=int32): int32[s0, 8]
const %w_t: int8[8, 6]
%1 = aten._to_copy(%w_t, dtype=int32): int32[8, 6]
%2 = aten.mm(%0, %1): int32[s0, 6]
%3 = aten.t(%2): int32[6, s0]
return (%3)
fired: swap-factors 1""",
    )


def test_refuses_other_integers() -> None:
    b = GraphBuilder()
    y = swapped(b, 4, torch.int16)
    assert refusal(finish(b, y), SwapFactors()) == (MissCode.PATTERN, y.name)


def test_refuses_a_product_with_the_weight_on_the_right_and_one_of_two_weights() -> None:
    b = GraphBuilder()
    w = b.call(aten._to_copy.default, b.const("w", WEIGHT), dtype=torch.int32)
    x = b.call(aten._to_copy.default, b.arg("x", torch.int8, 4, 6), dtype=torch.int32)
    both = b.call(aten.mm.default, w, b.call(aten.t.default, w))
    program = finish(b, b.call(aten.mm.default, x, w), both)
    assert refusal(program, SwapFactors())[0] is MissCode.PATTERN


@pytest.mark.numeric
@pytest.mark.parametrize("rows", [0, 1, 6])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_values_are_the_same(rows: int, dtype: torch.dtype) -> None:
    b = GraphBuilder()
    program = finish(b, swapped(b, rows, dtype))
    info = torch.iinfo(dtype)
    x = torch.randint(info.min, info.max + 1, (rows, 8), dtype=dtype)
    assert assert_same_values(program, [x], SwapFactors(), exact=True).fired == {"swap-factors": 1}
