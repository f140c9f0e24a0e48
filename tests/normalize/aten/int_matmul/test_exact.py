from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import aten, codes, finish, golden, refusal
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.normalize.aten.int_matmul.exact import ExactIntMm
from qfuse.rewrite.driver import apply_rules
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import run


def product(b: GraphBuilder, dtype: torch.dtype, m: int | str, k: int, n: int) -> Node:
    """Add ``_int_mm(x, t(w))``."""
    x = b.arg("x", dtype, m, k)
    w = b.call(aten.t.default, b.const("w", codes(n, k)))
    return b.call(aten._int_mm.default, x, w)


def test_golden_int_mm_is_mm_of_int32() -> None:
    b = GraphBuilder()

    program = finish(b, product(b, torch.int8, "m", 64, 8))

    assert_expected_inline(
        golden(program, ExactIntMm()),
        """\
%x: int8[s0, 64]
const %w: int8[8, 64]
%0 = aten.t(%w): int8[64, 8]
%1 = aten._to_copy(%x, dtype=int32): int32[s0, 64]
%2 = aten._to_copy(%0, dtype=int32): int32[64, 8]
%3 = aten.mm(%1, %2): int32[s0, 8]
return (%3)
fired: exact-int-mm 1""",
    )


def test_refuses_other_devices() -> None:
    b = GraphBuilder()
    y = product(b, torch.int8, 4, 64, 8)
    y.meta["val"] = torch.empty(4, 8, dtype=torch.int32, device="meta")

    assert refusal(finish(b, y), ExactIntMm()) == (MissCode.PATTERN, "_int_mm_default")


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 64, 8), (5, 63, 1), (7, 1, 3), (0, 64, 8)])
def test_sums_are_exact_whatever_the_strides(dtype: torch.dtype, m: int, k: int, n: int) -> None:
    b = GraphBuilder()
    program = finish(b, product(b, dtype, m, k, n))
    weight = program.module.get_buffer("w")

    assert apply_rules(program, [ExactIntMm()]).fired == {"exact-int-mm": 1}

    x = codes(m, k, dtype=dtype)
    if m == 1:
        # A row that was cut out of a larger buffer: its stride says nothing, and is not K.
        x = torch.cat([x, codes(1, k, dtype=dtype)]).as_strided((1, k), (0, 1))
    (y,) = run(program, [x])
    assert y.dtype == torch.int32
    assert torch.equal(y.long(), x.long() @ weight.long().t())


@pytest.mark.numeric
def test_the_largest_sums_are_exact() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.int8, 2, 4096)
    w = b.const("w", torch.full((4096, 3), -128, dtype=torch.int8))
    program = finish(b, b.call(aten._int_mm.default, x, w))

    apply_rules(program, [ExactIntMm()])

    (y,) = run(program, [torch.full((2, 4096), -128, dtype=torch.int8)])
    assert torch.equal(y, torch.full((2, 3), 128 * 128 * 4096, dtype=torch.int32))
