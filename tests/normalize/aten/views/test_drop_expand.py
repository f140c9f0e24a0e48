from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import assert_same_values, aten, finish, golden, refusal

from qfuse.ir.events import MissCode
from qfuse.normalize.aten.views.drop_expand import DropExpand
from qfuse.testing.build import GraphBuilder


def test_golden_both_operands_broadcast_by_themselves() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "n", 8)
    size = b.call(aten.sym_size.int, x, 0)
    row = b.call(aten.expand.default, b.arg("row", torch.float32, "n", 1), [size, 8])
    column = b.call(aten.expand.default, b.arg("column", torch.float32, 8), [size, 8])
    y = b.call(aten.div.Tensor, b.call(aten.mul.Tensor, x, row), column)

    assert_expected_inline(
        golden(
            finish(b, b.call(aten.sub.Tensor, y, b.call(aten.add.Tensor, row, column))),
            DropExpand(),
        ),
        """\
%x: float32[s0, 8]
%row: float32[s0, 1]
%column: float32[8]
%0 = aten.mul.Tensor(%x, %row): float32[s0, 8]
%1 = aten.div.Tensor(%0, %column): float32[s0, 8]
%2 = aten.add.Tensor(%row, %column): float32[s0, 8]
%3 = aten.sub.Tensor(%1, %2): float32[s0, 8]
return (%3)
fired: drop-expand 4""",
    )


def test_refuses_the_operand_that_gives_the_result_its_shape() -> None:
    b = GraphBuilder()
    row = b.call(aten.expand.default, b.arg("row", torch.float32, 3, 1), [3, 8])
    y = b.call(aten.mul.Tensor, row, b.arg("other", torch.float32, 3, 1))
    assert refusal(finish(b, y), DropExpand())[0] is MissCode.SHAPE


def test_refuses_sizes_that_are_equal_only_in_the_example() -> None:
    b = GraphBuilder()
    x, row = b.arg("x", torch.float32, "n", 1), b.arg("row", torch.float32, 1, "m")
    sizes = [b.call(aten.sym_size.int, x, 0), b.call(aten.sym_size.int, row, 1)]
    y = b.call(aten.mul.Tensor, b.call(aten.expand.default, x, sizes), b.arg("z", torch.float32, 1))
    assert refusal(finish(b, y), DropExpand())[0] is MissCode.SHAPE


@pytest.mark.parametrize("other", [torch.bfloat16, torch.float32])
def test_refuses_a_scalar_that_is_promoted_differently(other: torch.dtype) -> None:
    b = GraphBuilder()
    x = b.arg("x", other, 3, 8)
    s = b.call(aten.expand.default, b.const("s", torch.tensor(0.3)), [3, 8])
    program = finish(b, b.call(aten.mul.Tensor, x, s))
    if other is torch.bfloat16:
        assert refusal(program, DropExpand())[0] is MissCode.DTYPE
    else:
        assert_same_values(program, [torch.randn(3, 8)], DropExpand(), exact=True)


def test_refuses_nothing_of_an_addition_with_alpha_and_leaves_it() -> None:
    b = GraphBuilder()
    x, row = b.arg("x", torch.float32, 3, 8), b.arg("row", torch.float32, 3, 1)
    wide = b.call(aten.expand.default, row, [3, 8])
    y = b.call(aten.add.Tensor, x, wide, alpha=2)
    assert refusal(finish(b, y), DropExpand())[0] is MissCode.ARGUMENT


@pytest.mark.numeric
@pytest.mark.parametrize("op", [aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.sub.Tensor])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_values_are_the_same_bits(
    op: torch._ops.OpOverload, first: bool, dtype: torch.dtype
) -> None:
    b = GraphBuilder()
    x = b.arg("x", dtype, "n", 8)
    wide = b.call(
        aten.expand.default,
        b.arg("row", torch.float32, "n", 1),
        [b.call(aten.sym_size.int, x, 0), 8],
    )
    y = b.call(op, *((wide, x) if first else (x, wide)))
    inputs = [torch.randn(5, 8).mul(9).to(dtype), torch.randn(5, 1)]
    fired = assert_same_values(finish(b, y), inputs, DropExpand(), exact=True).fired
    assert fired == {"drop-expand": 1}
