"""Operands of sums and products that broadcast to the features of a linear."""

from __future__ import annotations

import pytest
import torch
from tests.support.cases.epilogue import Case, fuse, only_miss

from qfuse.ir.events import MissCode
from qfuse.optimize.fuse.epilogue_add import FuseAdd

add = torch.ops.aten.add.Tensor
F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.numeric
@pytest.mark.parametrize("number", [1.5, 3, 0.1, -0.0, float("inf")])
def test_a_number_for_a_linear(number: float) -> None:
    case = Case()
    program = case.done(case.b.call(add, case.y, number))

    assert fuse(program, FuseAdd).fired == {"fuse-add": 1}


@pytest.mark.numeric
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("shape", [(4,), (1, 4), (1,), (1, 1), ()], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_one_value_per_feature_of_a_linear(
    rank: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    case = Case(rank)
    row = case.b.const("row", torch.randn(shape, dtype=dtype))
    program = case.done(case.b.call(add, row, case.y))

    assert fuse(program, FuseAdd).fired == {"fuse-add": 1}


@pytest.mark.numeric
def test_a_row_that_is_computed() -> None:
    case = Case()
    program = case.done(case.b.call(add, case.y, case.b.arg("row", F32, 4)))

    assert fuse(program, FuseAdd).fired == {"fuse-add": 1}


@pytest.mark.parametrize("shape", [("m", 1), (1,), (1, 1)], ids=str)
def test_refuses_what_is_not_one_value_per_feature(shape: tuple[int | str, ...]) -> None:
    case = Case()
    column = case.b.arg("column", F32, *shape)
    program = case.done(case.b.call(add, case.y, column))

    miss = only_miss(program, FuseAdd)
    assert (miss.code, miss.at.name) == (MissCode.SHAPE, column.name)


def test_refuses_a_summand_of_more_axes() -> None:
    case = Case()
    other = case.b.const("other", torch.ones(1, 1, 1))
    program = case.done(case.b.call(add, case.y, other))

    assert only_miss(program, FuseAdd).code is MissCode.SHAPE
