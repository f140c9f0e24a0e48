from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    codes,
    finish,
    golden,
    refusal,
)
from torch.fx import Node
from torch.fx.node import Argument

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.normalize.aten.int_matmul.exact import ExactIntMm
from qfuse.normalize.aten.int_matmul.shift import IntMmShift
from qfuse.testing.build import GraphBuilder

K, N = 33, 5


def product(b: GraphBuilder, x: Node, weight: Node | None = None) -> tuple[Node, Node]:
    """Add ``mm(int32(x), int32(t(w)))``; return it and the weight."""
    w = weight or b.const("w", codes(N, K))
    left = b.call(aten._to_copy.default, x, dtype=torch.int32)
    t = b.call(aten.t.default, w)
    return b.call(aten.mm.default, left, b.call(aten._to_copy.default, t, dtype=torch.int32)), w


def test_golden_unsigned_numbers_that_are_shifted_back() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.int8, "m", K)
    wide = b.call(aten._to_copy.default, x, dtype=torch.int32)
    u = b.call(aten._to_copy.default, b.call(aten.add.Tensor, wide, 128), dtype=torch.uint8)
    t = b.call(aten.t.default, b.const("w", codes(N, K)))
    sums = b.call(aten.sum.dim_IntList, t, (0,), True, dtype=torch.int32)
    y = b.call(aten._int_mm.default, u, t)
    y = b.call(aten.sub.Tensor, y, b.call(aten.mul.Tensor, sums, 128))

    assert_expected_inline(
        golden(finish(b, y), ExactIntMm(), IntMmShift()),
        """\
%x: int8[s0, 33]
const %w: int8[5, 33]
%0 = aten.t(%w): int8[33, 5]
%1 = aten._to_copy(%0, dtype=int32): int32[33, 5]
%2 = aten._to_copy(%x, dtype=int32): int32[s0, 33]
%3 = aten.mm(%2, %1): int32[s0, 5]
return (%3)
fired: exact-int-mm 1, int-mm-shift 1""",
    )


def test_golden_a_zero_point_per_row() -> None:
    b = GraphBuilder()
    y, w = product(b, b.arg("x", torch.int8, "m", K))
    sums = b.call(aten.sum.dim_IntList, w, (-1,))
    zero = b.arg("z", torch.int8, "m", 1)
    y = b.call(aten.sub.Tensor, y, b.call(aten.mul.Tensor, zero, sums))

    assert_expected_inline(
        golden(finish(b, y), IntMmShift()),
        """\
%x: int8[s0, 33]
const %w: int8[5, 33]
%0 = aten.t(%w): int8[33, 5]
%1 = aten._to_copy(%0, dtype=int32): int32[33, 5]
%z: int8[s0, 1]
%2 = aten._to_copy(%x, dtype=int32): int32[s0, 33]
%3 = aten._to_copy(%z, dtype=int32): int32[s0, 1]
%4 = aten.sub.Tensor(%2, %3): int32[s0, 33]
%5 = aten.mm(%4, %1): int32[s0, 5]
%6 = aten._to_copy(%5, dtype=int64): int64[s0, 5]
return (%6)
fired: int-mm-shift 1""",
    )


def corrected(
    zero: Callable[[GraphBuilder], Argument],
    sums: Callable[[GraphBuilder, Node], Node],
    *,
    alpha: int = 1,
    twice: bool = False,
) -> CapturedGraph:
    """Subtract ``zero * sums`` from a product of ``x [5, K]``; both are made by functions."""
    b = GraphBuilder()
    y, w = product(b, b.arg("x", torch.int8, N, K))
    correction = b.call(aten.mul.Tensor, sums(b, w), zero(b))
    out = b.call(aten.sub.Tensor, y, correction, alpha=alpha)
    return finish(b, out, y) if twice else finish(b, out)


def over_k(b: GraphBuilder, w: Node) -> Node:
    return b.call(aten.sum.dim_IntList, w, (1,), dtype=torch.int32)


def three(_: GraphBuilder) -> int:
    return 3


def test_refuses_sums_over_the_other_axis() -> None:
    b = GraphBuilder()
    square = b.const("w", codes(K, K))
    y, w = product(b, b.arg("x", torch.int8, 4, K), square)
    sums = b.call(aten.sum.dim_IntList, w, (0,), dtype=torch.int32)
    program = finish(b, b.call(aten.sub.Tensor, y, b.call(aten.mul.Tensor, sums, 3)))

    assert refusal(program, IntMmShift()) == (MissCode.PATTERN, "mul_tensor")


def test_refuses_sums_of_another_weight() -> None:
    program = corrected(three, lambda b, _: over_k(b, b.const("v", codes(N, K))))

    assert refusal(program, IntMmShift()) == (MissCode.PATTERN, "mul_tensor")


def test_refuses_sums_that_wrap() -> None:
    program = corrected(three, lambda b, w: b.call(aten.sum.dim_IntList, w, (1,), dtype=torch.int8))

    assert refusal(program, IntMmShift()) == (MissCode.PATTERN, "mul_tensor")


def test_refuses_constants_that_are_not_the_sums() -> None:
    program = corrected(three, lambda b, _: b.const("c", torch.ones(N, dtype=torch.int32)))

    assert refusal(program, IntMmShift()) == (MissCode.PATTERN, "mul_tensor")


def test_refuses_a_zero_point_per_feature() -> None:
    program = corrected(lambda b: b.arg("z", torch.int8, N), over_k)

    assert refusal(program, IntMmShift()) == (MissCode.AXIS, "z")


def test_refuses_sums_that_spread_over_rows() -> None:
    program = corrected(
        three, lambda b, w: b.call(aten.sum.dim_IntList, w, (1,), True, dtype=torch.int32)
    )

    assert refusal(program, IntMmShift()) == (MissCode.AXIS, "sum_dim_int_list")


def test_refuses_a_difference_in_64_bits_of_numbers_that_may_be_large() -> None:
    program = corrected(
        lambda b: b.arg("z", torch.int32, N, 1),
        lambda b, w: b.call(aten.sum.dim_IntList, w, (1,)),
    )

    assert refusal(program, IntMmShift()) == (MissCode.DTYPE, "sub_tensor")


def unsigned(k: int) -> CapturedGraph:
    """A product of uint8 values whose sums are as large as they can be."""
    b = GraphBuilder()
    weight = b.const("w", torch.full((1, k), 255, dtype=torch.uint8))
    y, w = product(b, b.arg("x", torch.uint8, 1, k), weight)
    sums = b.call(aten.sum.dim_IntList, w, (1,))
    zero = b.const("z", torch.tensor([[255]]))
    return finish(b, b.call(aten.sub.Tensor, y, b.call(aten.mul.Tensor, zero, sums)))


def test_refuses_unsigned_weights_whose_sums_may_wrap() -> None:
    """255 * (255 + 255) per product: 16,513 of them leave 32 bits."""
    assert "int-mm-shift 1" in golden(unsigned(16512), IntMmShift())
    assert refusal(unsigned(16513), IntMmShift()) == (MissCode.DTYPE, "sub_tensor")


@pytest.mark.parametrize("number", [128, -129, 2**30 + 1])
def test_refuses_a_zero_point_outside_of_the_range(number: int) -> None:
    program = corrected(lambda _: number, over_k)

    assert refusal(program, IntMmShift()) == (MissCode.ZERO_POINT, "sub_tensor")


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_refuses_a_zero_point_that_may_be_outside_of_the_range(dtype: torch.dtype) -> None:
    program = corrected(lambda b: b.arg("z", dtype, N, 1), over_k)

    assert refusal(program, IntMmShift()) == (MissCode.ZERO_POINT, "sub_tensor")


def test_refuses_a_scaled_correction() -> None:
    program = corrected(three, over_k, alpha=2)

    assert refusal(program, IntMmShift()) == (MissCode.PATTERN, "sub_tensor")


def test_refuses_a_product_that_others_read() -> None:
    program = corrected(three, over_k, twice=True)

    assert refusal(program, IntMmShift()) == (MissCode.SHARED, "mm_default")


@pytest.mark.numeric
@pytest.mark.parametrize("zero", ["number", "rows", "tensor"])
@pytest.mark.parametrize("sums", ["int32", "int64", "known", "float"])
@pytest.mark.parametrize("m", [1, 4])
def test_integers_are_the_same(zero: str, sums: str, m: int) -> None:
    b = GraphBuilder()
    y, w = product(b, b.arg("x", torch.uint8, m, K))
    inputs = [codes(m, K, dtype=torch.uint8)]
    z: Argument = 77
    if zero == "rows":
        z = b.arg("z", torch.uint8, m, 1)
        inputs.append(codes(m, 1, dtype=torch.uint8))
    elif zero == "tensor":
        z = b.const("z", torch.tensor([[100]], dtype=torch.int32))
    match sums:
        case "int32" | "int64":
            dtype = torch.int32 if sums == "int32" else None
            s = b.call(aten.sum.dim_IntList, w, (-1,), dtype=dtype)
        case "known":
            s = b.const("c", b.module.get_buffer("w").sum(1).to(torch.int32))
        case _:
            s = b.call(aten.sum.dim_IntList, w, (-1,), dtype=torch.float32)
            s = b.call(aten._to_copy.default, s, dtype=torch.int32)
    factors = (z, s) if isinstance(z, Node) else (s, z)
    y = b.call(aten.sub.Tensor, y, b.call(aten.mul.Tensor, *factors))

    result = assert_same_values(finish(b, y), inputs, IntMmShift(), exact=True)

    assert result.fired == ({} if sums == "float" else {"int-mm-shift": 1})


@pytest.mark.numeric
@pytest.mark.parametrize("m", [1, 7])
def test_the_unsigned_spelling_gives_the_signed_integers(m: int) -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.int8, "m", K)
    wide = b.call(aten._to_copy.default, x, dtype=torch.int32)
    u = b.call(aten._to_copy.default, b.call(aten.add.Tensor, wide, 128), dtype=torch.uint8)
    y, w = product(b, u)
    sums = b.call(aten.sum.dim_IntList, w, (1,), dtype=torch.int32)
    y = b.call(aten.sub.Tensor, y, b.call(aten.mul.Tensor, sums, 128))

    result = assert_same_values(finish(b, y), [codes(m, K)], IntMmShift(), exact=True)

    assert result.fired == {"int-mm-shift": 1}


def compensated(b: GraphBuilder, factor: int, op: torch._ops.OpOverload, off: int = 0) -> Node:
    """A product whose correction was multiplied ahead of time; ``off`` makes it wrong."""
    weight = codes(N, K)
    constant = factor * weight.sum(1, dtype=torch.int32)
    constant[-1] += off
    y, _ = product(b, b.arg("x", torch.int8, "m", K), b.const("w", weight))
    return b.call(op, y, b.const("correction", constant))


@pytest.mark.parametrize("op", [aten.sub.Tensor, aten.add.Tensor])
def test_refuses_a_constant_that_is_no_multiple_of_the_sums(op: torch._ops.OpOverload) -> None:
    b = GraphBuilder()
    assert refusal(finish(b, compensated(b, 3, op, off=1)), IntMmShift())[0] is MissCode.PATTERN


@pytest.mark.numeric
@pytest.mark.parametrize("op", [aten.sub.Tensor, aten.add.Tensor])
@pytest.mark.parametrize("factor", [-7, 100])
def test_a_constant_correction_gives_the_same_integers(
    op: torch._ops.OpOverload, factor: int
) -> None:
    b = GraphBuilder()
    program = finish(b, compensated(b, factor, op))
    result = assert_same_values(program, [codes(4, K)], IntMmShift(), exact=True)
    assert result.fired == {"int-mm-shift": 1}
