from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    calls,
    codes,
    finish,
    golden,
    refusal,
    scales,
)
from torch.fx import Node
from torch.fx.node import Argument

from qfuse.ir.events import MissCode
from qfuse.ir.ops import library as ops
from qfuse.normalize.aten.qdq.dequantize import DequantizeChain
from qfuse.rewrite.driver import apply_rules
from qfuse.testing.build import GraphBuilder


def cast(b: GraphBuilder, q: Node, dtype: torch.dtype = torch.float32) -> Node:
    """Add a cast."""
    return b.call(aten._to_copy.default, q, dtype=dtype)


def test_golden_a_scale_per_row_and_a_zero_point() -> None:
    b = GraphBuilder()
    w = b.call(aten.sub.Tensor, cast(b, b.const("q", codes(4, 8))), 3)
    s = b.call(aten.unsqueeze.default, b.const("s", scales(4)), 1)

    program = finish(b, b.call(aten.mul.Tensor, w, s))

    assert_expected_inline(
        golden(program, DequantizeChain()),
        """\
const %q: int8[4, 8]
const %mul_tensor_zero_point: int32[4, 1]
const %s_scale: float32[4, 1]
%0 = qfuse.dequantize(%q, %s_scale, %mul_tensor_zero_point, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[4, 8]
return (%0)
fired: dequantize-chain 1""",
    )


def test_golden_integers_are_shifted_before_the_cast() -> None:
    b = GraphBuilder()
    zero = b.const("z", codes(4, 1).to(torch.int32))
    w = b.call(aten.sub.Tensor, cast(b, b.const("q", codes(4, 8)), torch.int32), zero)
    y = b.call(aten.mul.Tensor, b.const("s", scales(4, 1)), cast(b, w, torch.bfloat16))

    assert_expected_inline(
        golden(finish(b, y), DequantizeChain()),
        """\
const %q: int8[4, 8]
const %z: int32[4, 1]
const %s: float32[4, 1]
%0 = qfuse.dequantize(%q, %s, %z, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[4, 8]
return (%0)
fired: dequantize-chain 1""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("stored", [torch.int8, torch.uint8])
@pytest.mark.parametrize("zero", ["number", "tensor"])
def test_a_difference_in_eight_bits_wraps(stored: torch.dtype, zero: str) -> None:
    b = GraphBuilder()
    q = b.arg("q", stored, 4, 8)
    z = 100 if zero == "number" else b.const("z", torch.tensor(100, dtype=stored))
    w = cast(b, b.call(aten.sub.Tensor, q, z))
    program = finish(b, b.call(aten.mul.Tensor, w, b.const("s", scales(4, 1))))

    every = torch.arange(-128, 128) if stored is torch.int8 else torch.arange(256)
    inputs = every[torch.randperm(256)[:32]].reshape(4, 8).to(stored)
    assert_same_values(program, [inputs], DequantizeChain(), exact=True)
    # What is dequantized is the difference, which wrapped, and not q with a zero point.
    (dequantize,) = (n for n in program.graph.nodes if n.target is ops.dequantize)
    difference, _, zero_point, *_ = dequantize.args
    assert (difference.target, zero_point) == (aten.sub.Tensor, None)


def test_golden_an_activation_with_the_scale_that_made_it() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "b", "s", 8)
    spec = "int8[-128,127] 1x1x* float32 float32:divide:round-zp int"
    scale = b.call(aten.div.Tensor, b.call(aten.amax.default, x, (-1,), True), 127)
    q = b.call(ops.quantize, x, scale, None, spec)

    program = finish(b, b.call(aten.mul.Tensor, cast(b, q), scale))

    assert_expected_inline(
        golden(program, DequantizeChain()),
        """\
%x: float32[s0, s1, 8]
%0 = aten.amax(%x, (-1), True): float32[s0, s1, 1]
%1 = aten.div.Tensor(%0, 127): float32[s0, s1, 1]
%2 = qfuse.quantize(%x, %1, None, 'int8[-128,127] 1x1x* float32 float32:divide:round-zp int'): int8[s0, s1, 8]
%3 = qfuse.dequantize(%2, %1, None, 'int8[-128,127] 1x1x* float32 float32:divide:round-zp int'): float32[s0, s1, 8]
return (%3)
fired: dequantize-chain 1""",
    )


def test_golden_a_product_without_a_cast() -> None:
    b = GraphBuilder()
    y = b.call(aten.mul.Tensor, b.const("q", codes(4, 8)), b.const("s", scales(8)))

    assert_expected_inline(
        golden(finish(b, y), DequantizeChain()),
        """\
const %q: int8[4, 8]
const %s_scale: float32[1, 8]
%0 = qfuse.dequantize(%q, %s_scale, None, 'int8[-128,127] *x1 float32 float32:reciprocal:round-zp int'): float32[4, 8]
return (%0)
fired: dequantize-chain 1""",
    )


def test_refuses_a_factor_that_is_computed_at_run_time() -> None:
    b = GraphBuilder()
    mask = cast(b, b.arg("mask", torch.uint8, 4, 8))
    program = finish(b, b.call(aten.mul.Tensor, mask, b.arg("x", torch.float32, 4, 1)))

    assert refusal(program, DequantizeChain()) == (MissCode.NOT_CONSTANT, "x")


def test_refuses_the_scale_of_another_quantize() -> None:
    b = GraphBuilder()
    x, scale = b.arg("x", torch.float32, 4, 8), b.arg("s", torch.float32, 4, 1)
    spec = "int8[-128,127] 1x* float32 float32:divide:round-zp int"
    q = b.call(ops.quantize, x, b.const("t", scales(4, 1)), None, spec)
    program = finish(b, b.call(aten.mul.Tensor, cast(b, q), scale))

    assert refusal(program, DequantizeChain()) == (MissCode.NOT_CONSTANT, "s")


@pytest.mark.parametrize("shape", [(4, 8), (2, 4, 8), (2, 4, 1)])
def test_refuses_what_is_no_scale_by_its_shape(shape: tuple[int, ...]) -> None:
    b = GraphBuilder()
    w = cast(b, b.const("q", codes(4, 8)))
    program = finish(b, b.call(aten.mul.Tensor, w, b.const("s", scales(*shape))))

    assert refusal(program, DequantizeChain()) == (MissCode.SHAPE, "s")


def test_refuses_values_without_axes() -> None:
    b = GraphBuilder()
    y = b.call(aten.mul.Tensor, cast(b, b.arg("q", torch.int8)), 0.05)

    assert refusal(finish(b, y), DequantizeChain()) == (MissCode.SHAPE, "mul_tensor")


def test_refuses_one_scale_per_element_of_a_zero_point() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "m", 8)
    choose = "ao-asymmetric int8[-128,127] 1x* eps=1e-07 float32 int8"
    both = b.call(ops.choose_qparams, x, choose)
    y = b.call(aten.mul.Tensor, cast(b, b.item(both, 1)), b.item(both, 0))

    assert refusal(finish(b, y), DequantizeChain())[0] is MissCode.SHAPE


@pytest.mark.parametrize("zero", [0.5, 128, -129, float("nan")])
def test_refuses_a_zero_point_that_is_no_stored_number(zero: float) -> None:
    b = GraphBuilder()
    w = b.call(aten.sub.Tensor, cast(b, b.const("q", codes(4, 8))), zero)
    program = finish(b, b.call(aten.mul.Tensor, w, 0.1))

    assert refusal(program, DequantizeChain()) == (MissCode.ZERO_POINT, "mul_tensor")


def test_refuses_a_zero_point_of_other_blocks() -> None:
    b = GraphBuilder()
    w = b.call(aten.sub.Tensor, cast(b, b.const("q", codes(4, 8))), b.const("z", codes(1, 8)))
    program = finish(b, b.call(aten.mul.Tensor, w, b.const("s", scales(4, 1))))

    assert refusal(program, DequantizeChain()) == (MissCode.SHAPE, "mul_tensor")


@pytest.mark.parametrize(
    ("scale", "reason"),
    [
        (float("nan"), "the factor is nan, which is not finite, so it is not a scale"),
        (float("inf"), "the factor is inf, which is not finite, so it is not a scale"),
    ],
)
def test_refuses_a_factor_that_is_no_scale(scale: float, reason: str) -> None:
    b = GraphBuilder()
    program = finish(b, b.call(aten.mul.Tensor, cast(b, b.const("q", codes(4, 8))), scale))
    (miss,) = [m for _, m in apply_rules(program, [DequantizeChain()]).misses]

    assert (miss.code, miss.at.name) == (MissCode.RANGE, "mul_tensor")
    assert miss.reason == reason


@pytest.mark.numeric
@pytest.mark.parametrize("grid", [(), (4, 1), (1, 8)])
def test_scales_may_be_negative(grid: tuple[int, ...]) -> None:
    b = GraphBuilder()
    w = cast(b, b.const("q", codes(4, 8)))
    program = finish(b, b.call(aten.mul.Tensor, w, b.const("s", torch.randn(grid))))
    assert assert_same_values(program, [], DequantizeChain(), exact=True).fired


def test_names_the_factors_that_are_no_scales() -> None:
    b = GraphBuilder()
    wrong = torch.tensor([[0.1], [float("-inf")], [-0.3], [float("nan")]])
    product = b.call(aten.mul.Tensor, cast(b, b.const("q", codes(4, 8))), b.const("s", wrong))
    (miss,) = [m for _, m in apply_rules(finish(b, product), [DequantizeChain()]).misses]

    text = "2 of the 4 factors are not scales: the first of them is -inf, which is not finite"
    assert miss.reason == text


def test_zero_points_that_the_graph_counts() -> None:
    b = GraphBuilder()
    counted = b.call(aten.arange.start_step, -3, 5, 2)
    turned = b.call(aten.view.default, b.call(aten.remainder.Scalar, counted, 3), [4, 1])
    w = b.call(aten.sub.Tensor, cast(b, b.const("q", codes(4, 8))), turned)
    program = finish(b, b.call(aten.mul.Tensor, w, b.const("s", scales(4, 1))))
    assert_same_values(program, [], DequantizeChain(), exact=True)

    assert "aten.mul.Tensor" not in calls(program)


def test_refuses_a_scaled_subtraction() -> None:
    b = GraphBuilder()
    w = b.call(aten.sub.Tensor, cast(b, b.const("q", codes(4, 8))), 3, alpha=2)
    program = finish(b, b.call(aten.mul.Tensor, w, 0.1))

    assert refusal(program, DequantizeChain()) == (MissCode.ARGUMENT, "sub_tensor")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("whole", [torch.int16, torch.int32, torch.int64])
def test_refuses_float8_of_which_only_the_integer_part_is_used(
    dtype: torch.dtype, whole: torch.dtype
) -> None:
    b = GraphBuilder()
    q = b.const("q", torch.rand(4, 8).to(dtype))
    y = b.call(aten.mul.Tensor, cast(b, cast(b, q, whole)), b.const("s", scales(4, 1)))

    code, at = refusal(finish(b, y), DequantizeChain())
    assert (code, at) == (MissCode.PATTERN, "_to_copy_default_1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shifted", ["integers", "floats"])
def test_refuses_differences_that_16_bits_round(dtype: torch.dtype, shifted: str) -> None:
    b = GraphBuilder()
    x, s = b.arg("x", torch.float32, 4, 8), b.arg("s", dtype, 4, 1)
    zero = b.arg("z", torch.int32, 4, 1)
    spec = "int8[-128,127] 1x* float32 float32:reciprocal:round-zp int"
    q = b.call(ops.quantize, x, s, zero, spec)
    if shifted == "floats":
        w = b.call(aten.sub.Tensor, cast(b, q, dtype), cast(b, zero, dtype))
    else:
        w = cast(b, b.call(aten.sub.Tensor, cast(b, q, torch.int32), zero), dtype)
    program = finish(b, b.call(aten.mul.Tensor, w, s))
    if dtype is torch.float32:
        assert "dequantize-chain 1" in golden(program, DequantizeChain())
    else:
        # Of the float zero point it is not even known that it shows integers.
        code = MissCode.NOT_CONSTANT if shifted == "floats" else MissCode.ZERO_POINT
        assert refusal(program, DequantizeChain())[0] is code


def test_refuses_32_bit_numbers_which_a_cast_rounds() -> None:
    b = GraphBuilder()
    q = b.const("q", torch.randint(-(2**31), 2**31, (4, 8), dtype=torch.int32))
    program = finish(b, b.call(aten.mul.Tensor, cast(b, q), 0.1))

    assert refusal(program, DequantizeChain()) == (MissCode.PATTERN, "q")


def sixteen(b: GraphBuilder, x: Node, zero: Node | None) -> tuple[Node, Node]:
    """Quantize ``x`` to 16 bits; returns the values and their scale."""
    s = b.const("s", scales(4, 1))
    spec = "int16[-32768,32767] 1x* float32 float32:divide:round-zp int"
    return b.call(ops.quantize, x, s, zero, spec), s


def test_golden_values_that_were_quantized_to_sixteen_bits() -> None:
    b = GraphBuilder()
    q, s = sixteen(b, b.arg("x", torch.float32, 4, 8), None)

    assert_expected_inline(
        golden(finish(b, b.call(aten.mul.Tensor, cast(b, q), s)), DequantizeChain()),
        """\
%x: float32[4, 8]
const %s: float32[4, 1]
%0 = qfuse.quantize(%x, %s, None, 'int16[-32768,32767] 1x* float32 float32:divide:round-zp int'): int16[4, 8]
const %s: float32[4, 1]
%1 = qfuse.dequantize(%0, %s, None, 'int16[-32768,32767] 1x* float32 float32:divide:round-zp int'): float32[4, 8]
return (%1)
fired: dequantize-chain 1""",
    )


def test_refuses_constants_of_sixteen_bits() -> None:
    b = GraphBuilder()
    q = b.const("q", torch.randint(-(2**15), 2**15, (4, 8), dtype=torch.int16))
    program = finish(b, b.call(aten.mul.Tensor, cast(b, q), 0.1))

    assert refusal(program, DequantizeChain())[1] == "q"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_refuses_sixteen_bits_that_a_cast_rounds(dtype: torch.dtype) -> None:
    b = GraphBuilder()
    q, s = sixteen(b, b.arg("x", torch.float32, 4, 8), None)
    y = b.call(aten.mul.Tensor, cast(b, q, dtype), cast(b, s, dtype))

    assert "dequantize-chain" not in golden(finish(b, y), DequantizeChain())


def test_refuses_a_difference_in_sixteen_bits_which_wraps() -> None:
    b = GraphBuilder()
    q, s = sixteen(b, b.arg("x", torch.float32, 4, 8), None)
    w = cast(b, b.call(aten.sub.Tensor, q, 20000))

    assert "dequantize-chain" not in golden(
        finish(b, b.call(aten.mul.Tensor, w, s)), DequantizeChain()
    )


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("zero", ["none", "floats", "integers"])
def test_values_of_sixteen_bits_are_the_same_bits(dtype: torch.dtype, zero: str) -> None:
    b = GraphBuilder()
    z = None if zero == "none" else b.const("z", torch.full((4, 1), -30000, dtype=torch.int32))
    q, s = sixteen(b, b.arg("x", torch.float32, 4, 8), z)
    w = cast(b, q, torch.int32 if zero == "integers" else dtype)
    w = w if z is None else b.call(aten.sub.Tensor, w, z)
    w = cast(b, w, dtype) if zero == "integers" else w
    program = finish(b, b.call(aten.mul.Tensor, w, s))

    result = assert_same_values(program, [torch.randn(4, 8) * 1e3], DequantizeChain(), exact=True)

    assert result.fired == {"dequantize-chain": 1}


SCALES: dict[str, Callable[[GraphBuilder], Argument]] = {
    "number": lambda _: 0.0123,
    "scalar": lambda b: b.const("s", scales(1).reshape(())),
    "rows": lambda b: b.const("s", scales(7, 1)),
    "columns": lambda b: b.const("s", scales(9)),
    "rows16": lambda b: b.const("s", scales(7, 1, dtype=torch.bfloat16)),
    "scalar64": lambda b: b.const("s", scales(1, dtype=torch.float64).reshape(())),
}


@pytest.mark.numeric
@pytest.mark.parametrize("spelling", SCALES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("stored", [torch.int8, torch.uint8])
@pytest.mark.parametrize("zero", ["none", "number", "tensor", "integers"])
def test_values_are_the_same_bits(
    spelling: str, dtype: torch.dtype, stored: torch.dtype, zero: str
) -> None:
    b = GraphBuilder()
    q = b.const("q", codes(7, 9, dtype=stored))
    if zero == "integers":
        shifted = b.call(aten.sub.Tensor, cast(b, q, torch.int16), 77)
        w = cast(b, shifted, dtype)
    else:
        w = cast(b, q, dtype)
    if zero == "number":
        w = b.call(aten.sub.Tensor, w, 121)
    elif zero == "tensor":
        w = b.call(aten.sub.Tensor, w, b.const("z", torch.tensor(121)))
    program = finish(b, b.call(aten.mul.Tensor, w, SCALES[spelling](b)))

    result = assert_same_values(program, [], DequantizeChain(), exact=True)

    assert result.fired == {"dequantize-chain": 1}


@pytest.mark.numeric
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_of_float8_are_the_same_bits(stored: torch.dtype, dtype: torch.dtype) -> None:
    b = GraphBuilder()
    q = torch.arange(256, dtype=torch.uint8).view(stored).reshape(16, 16)
    w = cast(b, b.const("q", q), dtype)
    program = finish(b, b.call(aten.mul.Tensor, w, b.const("s", scales(16, 1).to(dtype))))

    result = assert_same_values(program, [], DequantizeChain(), exact=True)

    assert result.fired == {"dequantize-chain": 1}
