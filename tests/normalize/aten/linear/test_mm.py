from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    finish,
    golden,
    refusal,
    whole,
)

from qfuse.ir.events import MissCode
from qfuse.normalize.aten.linear.spellings import LINEAR_FROM
from qfuse.testing.build import GraphBuilder


def test_golden_a_transposed_weight() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "m", 8)
    w = b.const("w", torch.randn(4, 8))
    y = b.call(aten.mm.default, x, b.call(aten.t.default, w))

    assert_expected_inline(
        golden(finish(b, y), LINEAR_FROM["mm"]()),
        """\
%x: float32[s0, 8]
const %w: float32[4, 8]
%0 = aten.linear(%x, %w): float32[s0, 4]
return (%0)
fired: linear-from-mm 1""",
    )


def test_golden_a_weight_that_is_stored_transposed_is_viewed_once() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "m", 8)
    tied = torch.randn(8, 4)
    one = b.call(aten.mm.default, x, b.const("w", tied))
    two = b.call(aten.mm.default, b.call(aten.relu.default, x), b.const("w", tied))
    program = finish(b, one, two)

    assert_expected_inline(
        golden(program, LINEAR_FROM["mm"]()),
        """\
%x: float32[s0, 8]
const %w_t: float32[4, 8]
%0 = aten.linear(%x, %w_t): float32[s0, 4]
%1 = aten.relu(%x): float32[s0, 8]
const %w_t: float32[4, 8]
%2 = aten.linear(%1, %w_t): float32[s0, 4]
return (%0, %2)
fired: linear-from-mm 2""",
    )
    assert program.module.get_buffer("w_t").data_ptr() == tied.data_ptr()


def test_golden_a_cast_and_stored_weight() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.bfloat16, 3, 8)
    q = b.const("q", torch.zeros(4, 8, dtype=torch.int8))
    w = b.call(aten._to_copy.default, b.call(aten.t.default, q), dtype=torch.bfloat16)
    y = b.call(aten.mm.default, x, w)

    assert_expected_inline(
        golden(finish(b, y), LINEAR_FROM["mm"]()),
        """\
%x: bfloat16[3, 8]
const %q: int8[4, 8]
%0 = aten._to_copy(%q, dtype=bfloat16): bfloat16[4, 8]
%1 = aten.linear(%x, %0): bfloat16[3, 4]
return (%1)
fired: linear-from-mm 1""",
    )


def test_refuses_two_activations() -> None:
    b = GraphBuilder()
    x, y = b.arg("x", torch.float32, 3, 8), b.arg("y", torch.float32, 8, 4)
    program = finish(b, b.call(aten.mm.default, x, y))

    assert refusal(program, LINEAR_FROM["mm"]()) == (MissCode.NOT_CONSTANT, "y")


def test_refuses_a_weight_that_the_program_writes() -> None:
    b = GraphBuilder()
    x, w = b.arg("x", torch.float32, 3, 8), b.const("w", torch.randn(8, 4))
    w.meta["qfuse_mutable"] = True
    program = finish(b, b.call(aten.mm.default, x, w))

    assert refusal(program, LINEAR_FROM["mm"]()) == (MissCode.NOT_CONSTANT, "w")


def test_refuses_integers() -> None:
    b = GraphBuilder()
    x, w = b.arg("x", torch.int32, 3, 8), b.const("w", torch.ones(8, 4, dtype=torch.int32))
    program = finish(b, b.call(aten.mm.default, x, w))

    assert refusal(program, LINEAR_FROM["mm"]()) == (MissCode.NOT_CONSTANT, "w")


@pytest.mark.numeric
@pytest.mark.parametrize("m", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("transposed", [True, False])
def test_values_are_the_same_bits(m: int, dtype: torch.dtype, transposed: bool) -> None:
    b = GraphBuilder()
    x = b.arg("x", dtype, "m", 8)
    w = b.const("w", torch.randn(4, 8, dtype=dtype) if transposed else torch.randn(8, 4).to(dtype))
    y = b.call(aten.mm.default, x, b.call(aten.t.default, w) if transposed else w)

    result = assert_same_values(
        finish(b, y), [torch.randn(m, 8).to(dtype)], LINEAR_FROM["mm"](), exact=True
    )

    assert result.fired == {"linear-from-mm": 1}


@pytest.mark.numeric
def test_sums_of_whole_numbers_are_exact() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 7, 33)
    y = b.call(aten.mm.default, x, b.const("w", whole(33, 5)))

    assert_same_values(finish(b, y), [whole(7, 33)], LINEAR_FROM["mm"](), exact=True)
