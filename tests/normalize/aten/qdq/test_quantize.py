from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    finish,
    golden,
    refusal,
    scales,
)
from tests.support.sources.dialects import hard_numbers
from torch.fx import Node
from torch.fx.node import Argument

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.normalize.aten.qdq.quantize import QuantizeChain
from qfuse.rewrite.rule import Miss
from qfuse.testing.build import GraphBuilder

K = 9


def codes_of(
    b: GraphBuilder,
    y: Node,
    zero: Argument = None,
    bounds: tuple[float | None, float | None] = (-128, 127),
    dtype: torch.dtype = torch.int8,
    order: str = "round, zero, clamp",
) -> Node:
    """Add the steps after the scaling in the given order, and the cast."""
    for step in order.split(", "):
        if step == "round":
            y = b.call(aten.round.default, y)
        elif step == "clamp":
            y = b.call(aten.clamp.default, y, *bounds)
        elif zero is not None:
            y = b.call(aten.add.Tensor, y, zero)
    return b.call(aten._to_copy.default, y, dtype=dtype)


def test_golden_division_by_a_number() -> None:
    b = GraphBuilder()
    y = b.call(aten.div.Tensor, b.arg("x", torch.float32, "m", K), 0.05)

    program = finish(b, codes_of(b, y, 3, (-128, 127)))

    assert_expected_inline(
        golden(program, QuantizeChain()),
        """\
%x: float32[s0, 9]
const %_to_copy_default_zero_point: int32[1, 1]
const %div_tensor_scale: float32[1, 1]
%0 = qfuse.quantize(%x, %div_tensor_scale, %_to_copy_default_zero_point, 'int8[-128,127] *x* float32 float32:divide:round-zp int'): int8[s0, 9]
return (%0)
fired: quantize-chain 1""",
    )


def test_golden_product_with_a_reciprocal_number() -> None:
    b = GraphBuilder()
    y = b.call(aten.mul.Tensor, b.arg("x", torch.float32, "m", K), 1 / 0.05)
    program = finish(b, codes_of(b, y, 128, (0, 255), torch.uint8, "zero, round, clamp"))

    assert_expected_inline(
        golden(program, QuantizeChain()),
        """\
%x: float32[s0, 9]
const %_to_copy_default_zero_point: int32[1, 1]
const %mul_tensor_reciprocal: float32[1, 1]
%0 = qfuse.quantize(%x, %mul_tensor_reciprocal, %_to_copy_default_zero_point, 'uint8[0,255] *x* float32 float32:reciprocal:zp-round int'): uint8[s0, 9]
return (%0)
fired: quantize-chain 1""",
    )
    assert program.module.get_buffer("mul_tensor_reciprocal").item() == torch.tensor(0.05).item()


def test_golden_a_scale_that_is_computed_at_run_time() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.bfloat16, "b", "s", K)
    wide = b.call(aten._to_copy.default, x, dtype=torch.float32)
    scale = b.call(aten.div.Tensor, b.call(aten.amax.default, wide, (-1,), True), 127)
    y = b.call(aten.mul.Tensor, wide, b.call(aten.reciprocal.default, scale))
    y = codes_of(b, y, order="clamp, round", bounds=(-127.0, 127.0))

    assert_expected_inline(
        golden(finish(b, y), QuantizeChain()),
        """\
%x: bfloat16[s0, s1, 9]
%0 = aten._to_copy(%x, dtype=float32): float32[s0, s1, 9]
%1 = aten.amax(%0, (-1), True): float32[s0, s1, 1]
%2 = aten.div.Tensor(%1, 127): float32[s0, s1, 1]
%3 = qfuse.quantize(%0, %2, None, 'int8[-127,127] 1x1x* float32 float32:reciprocal:round-zp int'): int8[s0, s1, 9]
return (%3)
fired: quantize-chain 1""",
    )


def test_golden_sixteen_bits() -> None:
    program = divided(bounds=(-32768, 32767), dtype_of_values=torch.int16)

    assert_expected_inline(
        golden(program, QuantizeChain()),
        """\
%x: float32[3, 9]
const %div_tensor_scale: float32[1, 1]
%0 = qfuse.quantize(%x, %div_tensor_scale, None, 'int16[-32768,32767] *x* float32 float32:divide:round-zp int'): int16[3, 9]
return (%0)
fired: quantize-chain 1""",
    )


def divided(
    by: float = 0.05,
    dtype: torch.dtype = torch.float32,
    dtype_of_values: torch.dtype = torch.int8,
    **steps: Any,
) -> CapturedGraph:
    """Quantize ``x [3, K]`` by a quotient."""
    b = GraphBuilder()
    y = b.call(aten.div.Tensor, b.arg("x", dtype, 3, K), by)
    return finish(b, codes_of(b, y, dtype=dtype_of_values, **steps))


def test_refuses_a_cast_without_a_clamp() -> None:
    assert refusal(divided(order="round"), QuantizeChain()) == (MissCode.RANGE, "div_tensor")


@pytest.mark.parametrize(
    "bounds", [(-128, None), (None, 127), (-129, 127), (0, 255), (-127.5, 127), (5, -5)]
)
def test_refuses_bounds_that_are_no_range(bounds: tuple[float | None, float | None]) -> None:
    assert refusal(divided(bounds=bounds), QuantizeChain()) == (MissCode.RANGE, "clamp_default")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_refuses_sixteen_bits_in_a_float_that_does_not_hold_them(dtype: torch.dtype) -> None:
    b = GraphBuilder()
    y = b.call(aten.div.Tensor, b.arg("x", dtype, 3, K), b.const("s", scales(1, 1).to(dtype)))
    program = finish(b, codes_of(b, y, bounds=(-32768, 32767), dtype=torch.int16))

    assert refusal(program, QuantizeChain()) == (MissCode.DTYPE, "div_tensor")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_refuses_integers_of_more_than_sixteen_bits(dtype: torch.dtype) -> None:
    program = divided(dtype_of_values=dtype)

    assert refusal(program, QuantizeChain()) == (MissCode.DTYPE, "_to_copy_default")


def test_refuses_what_is_not_rounded() -> None:
    assert refusal(divided(order="clamp"), QuantizeChain()) == (MissCode.PATTERN, "div_tensor")


NEAREST = "expected aten.round to the nearest integer"
NO_CLAMP = "before the cast to integers, found {}: out of range, the cast is undefined"


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        (
            {"order": "clamp"},
            f"{NEAREST}, or its sum with a zero point, found aten.div.Tensor",
        ),
        (
            {"order": "zero, clamp", "zero": 3},
            f"{NEAREST}, found aten.div.Tensor",
        ),
        (
            {"order": "round"},
            f"expected aten.clamp to two numbers {NO_CLAMP.format('aten.div.Tensor')}",
        ),
        (
            {"order": "round, zero", "zero": 3},
            "expected aten.clamp to two numbers, or aten.round of it, "
            + NO_CLAMP.format("aten.add.Tensor"),
        ),
        (
            {"order": "round, round, clamp"},
            "expected aten.div by a scale, or aten.mul by its inverse, found aten.round",
        ),
        ({"bounds": (-128, None)}, "its clamp has no upper bound"),
    ],
)
def test_says_which_step_is_missing(steps: dict[str, Any], says: str) -> None:
    assert reason(divided(**steps)) == says


@pytest.mark.parametrize("rounding", [aten.floor.default, aten.ceil.default, aten.trunc.default])
def test_says_which_rounding_is_expected(rounding: Any) -> None:
    b = GraphBuilder()
    y = b.call(aten.div.Tensor, b.arg("x", torch.float32, 3, K), 0.05)
    y = b.call(aten.add.Tensor, b.call(rounding, y), 3)

    said = reason(finish(b, codes_of(b, y, order="clamp")))

    assert said == f"{NEAREST}, found aten.{rounding._opname}"


def reason(program: CapturedGraph) -> str:
    """Why the last call of the graph is not a quantize chain."""
    miss = QuantizeChain().match([*program.graph.nodes][-2])
    assert isinstance(miss, Miss)
    return miss.reason


def test_refuses_rounding_down() -> None:
    b = GraphBuilder()
    y = b.call(aten.div.Tensor, b.arg("x", torch.float32, 3, K), 0.05)
    program = finish(b, codes_of(b, b.call(aten.floor.default, y), order="clamp"))

    assert refusal(program, QuantizeChain()) == (MissCode.PATTERN, "floor_default")


def test_refuses_rounding_to_decimals() -> None:
    b = GraphBuilder()
    y = b.call(aten.div.Tensor, b.arg("x", torch.float32, 3, K), 0.05)
    y = b.call(aten.round.decimals, y, decimals=1)

    assert refusal(finish(b, codes_of(b, y, order="clamp")), QuantizeChain())[0] is (
        MissCode.PATTERN
    )


def test_refuses_floor_division() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3, K)
    y = b.call(aten.div.Tensor_mode, x, 0.05, rounding_mode="floor")

    assert refusal(finish(b, codes_of(b, y)), QuantizeChain()) == (
        MissCode.PATTERN,
        "div_tensor_mode",
    )


@pytest.mark.parametrize("scale", [0.0, -0.05, float("inf"), float("nan")])
def test_refuses_a_number_that_is_no_scale(scale: float) -> None:
    assert refusal(divided(scale), QuantizeChain()) == (MissCode.RANGE, "div_tensor")


@pytest.mark.parametrize("zero", [0.5, 200])
def test_refuses_a_zero_point_that_is_no_stored_number(zero: float) -> None:
    assert refusal(divided(zero=zero), QuantizeChain()) == (MissCode.ZERO_POINT, "_to_copy_default")


def test_refuses_a_number_in_16_bit_arithmetic() -> None:
    program = divided(dtype=torch.bfloat16)

    assert refusal(program, QuantizeChain()) == (MissCode.ARITHMETIC, "div_tensor")


def test_refuses_a_product_with_the_scale_itself() -> None:
    b = GraphBuilder()
    y = b.call(aten.mul.Tensor, b.arg("x", torch.float32, 3, K), b.arg("s", torch.float32, 3, 1))

    assert refusal(finish(b, codes_of(b, y)), QuantizeChain()) == (
        MissCode.ARITHMETIC,
        "mul_tensor",
    )


def test_refuses_a_scale_that_broadcasts_the_tensor() -> None:
    b = GraphBuilder()
    x, s = b.arg("x", torch.float32, 1, K), b.const("s", scales(3, 1))
    program = finish(b, codes_of(b, b.call(aten.div.Tensor, x, s)))

    assert refusal(program, QuantizeChain()) == (MissCode.SHAPE, "div_tensor")


def test_refuses_a_tensor_without_axes() -> None:
    b = GraphBuilder()
    program = finish(b, codes_of(b, b.call(aten.div.Tensor, b.arg("x", torch.float32), 0.05)))

    assert refusal(program, QuantizeChain()) == (MissCode.SHAPE, "div_tensor")


def test_refuses_a_scaled_shift() -> None:
    b = GraphBuilder()
    y = b.call(aten.div.Tensor, b.arg("x", torch.float32, 3, K), 0.05)
    y = b.call(aten.add.Tensor, b.call(aten.round.default, y), 3, alpha=2)
    program = finish(b, codes_of(b, y, order="clamp"))

    assert refusal(program, QuantizeChain()) == (MissCode.ARGUMENT, "add_tensor")


def test_refuses_other_casts() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3, K)
    program = finish(b, b.call(aten._to_copy.default, x, dtype=torch.bfloat16))

    assert refusal(program, QuantizeChain()) == (MissCode.DTYPE, "_to_copy_default")


def scaled(b: GraphBuilder, x: Node, spelling: str, scale: torch.Tensor) -> Node:
    """Scale ``x`` by ``scale``, or its one element, in one of the spellings."""
    number = scale.reshape(-1)[0].item()
    match spelling:
        case "div number":
            return b.call(aten.div.Tensor, x, number)
        case "mul number":
            return b.call(aten.mul.Tensor, x, 1 / number)
        case "div tensor":
            return b.call(aten.div.Tensor, x, b.const("s", scale))
        case "mul tensor":
            return b.call(aten.mul.Tensor, b.const("s", 1 / scale), x)
        case "reciprocal":
            inverse = b.call(aten.reciprocal.default, b.const("s", scale))
            return b.call(aten.mul.Tensor, x, b.call(aten.mul.Tensor, inverse, 1.0))
        case _:
            s = b.call(aten.unsqueeze.default, b.const("s", scale.reshape(-1)), 0)
            return b.call(aten.div.Tensor, x, s)


EVERY = ["div number", "mul number", "div tensor", "mul tensor", "reciprocal", "moved"]
# Numbers are refused in 16 bits; in float64 not every number is the reciprocal of another.
SPELLINGS = [
    *((torch.float32, spelling) for spelling in EVERY),
    *((torch.bfloat16, spelling) for spelling in EVERY if "number" not in spelling),
    *((torch.float64, spelling) for spelling in EVERY if "mul" not in spelling),
]
ORDERS = ["round, zero, clamp", "zero, round, clamp", "zero, clamp, round"]


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize(("dtype", "spelling"), SPELLINGS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("zero", [None, 7, -3.0])
def test_values_are_the_same_bits(
    spelling: str, order: str, dtype: torch.dtype, zero: float | None
) -> None:
    b = GraphBuilder()
    scale = scales(1, K).to(dtype)
    x = hard_numbers((80, K), dtype, scale)
    y = scaled(b, b.arg("x", dtype, "m", K), spelling, scale)
    program = finish(b, codes_of(b, y, zero, (-127, 126), order=order))

    result = assert_same_values(
        program, [x.nan_to_num().clamp(-1e4, 1e4)], QuantizeChain(), exact=True
    )

    assert result.fired == {"quantize-chain": 1}


@pytest.mark.numeric
@pytest.mark.parametrize("grid", [(1, 1), (6, 1), (1, K)])
def test_zero_points_per_block_are_the_same_bits(grid: tuple[int, int]) -> None:
    b = GraphBuilder()
    x, scale = b.arg("x", torch.float32, 6, K), scales(*grid)
    zero = b.const("z", torch.randint(0, 256, grid, dtype=torch.int32))
    y = b.call(aten.div.Tensor, x, b.const("s", scale))
    program = finish(b, codes_of(b, y, zero, (0, 255), torch.uint8))

    inputs = [hard_numbers((6, K), torch.float32, scale).nan_to_num().clamp(-1e4, 1e4)]
    result = assert_same_values(program, inputs, QuantizeChain(), exact=True)

    assert result.fired == {"quantize-chain": 1}


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("zero", [None, 30000])
def test_values_of_sixteen_bits_are_the_same_bits(
    order: str, dtype: torch.dtype, zero: float | None
) -> None:
    b = GraphBuilder()
    scale = scales(1, K).to(dtype)
    y = b.call(aten.div.Tensor, b.arg("x", dtype, "m", K), b.const("s", scale))
    program = finish(b, codes_of(b, y, zero, (-32768, 32767), torch.int16, order))

    # Beyond both ends of the range, and ties.
    x = torch.cat([torch.randn(40, K) * 3e4, (torch.arange(-9, 9) + 0.5).expand(K, -1).t()])
    result = assert_same_values(program, [x * scale], QuantizeChain(), exact=True)

    assert result.fired == {"quantize-chain": 1}
