from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from tests.support.sources.dialects import (
    FLOATS,
    INTEGERS,
    SEEDS,
    Source,
    assert_same_bits,
    codes,
    fired,
    hard_numbers,
    only_miss,
    ops_of,
    scales,
)
from tests.support.sources.qparams import SCALE_TYPES, assert_never_runs

from qfuse.ir.errors import BlockError
from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import MODULE_META, SOURCE_META
from qfuse.ir.graph.text import to_text
from qfuse.normalize import normalize

d = torch.ops.quantized_decomposed
SHAPES = st.sampled_from([(1,), (7,), (3, 5), (0, 4), (4, 0), (1, 9), (2, 3, 4), (3, 2, 4, 5)])
ZERO_TYPES = st.sampled_from([torch.int64, torch.int32, torch.float32, None])


def test_golden_a_weight_gets_a_scale_of_its_own_rank() -> None:
    source = Source()
    w = source.b.const("w", codes((4, 8), torch.int8))
    scale = source.b.const("scale", scales((4,)))
    zero = source.b.const("zero", torch.zeros(4, dtype=torch.int64))
    y = source.b.call(d.dequantize_per_channel.default, w, scale, zero, -2, -127, 127, torch.int8)
    program = normalize(source.done(y))

    assert fired(program) == ["normalize-dequantize-per-channel"]
    assert_expected_inline(
        to_text(program.graph),
        """\
const %w: int8[4, 8]
const %scale_grid: float32[4, 1]
%0 = qfuse.dequantize(%w, %scale_grid, None, 'int8[-127,127] 1x* float32 float32:reciprocal:round-zp int'): float32[4, 8]
return (%0)""",
    )


def test_golden_parameters_of_run_time_are_viewed() -> None:
    source = Source()
    x = source.b.arg("x", torch.float32, "B", 8)
    scale, zero = source.b.arg("s", torch.float32, 8), source.b.arg("z", torch.int32, 8)
    q = source.b.call(d.quantize_per_channel.default, x, scale, zero, 1, 0, 255, torch.uint8)
    program = normalize(source.done(q))

    assert fired(program) == ["normalize-quantize-per-channel"]
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, 8]
%s: float32[8]
%z: int32[8]
%0 = aten.view(%s, (1, 8)): float32[1, 8]
%1 = aten.view(%z, (1, 8)): int32[1, 8]
%2 = qfuse.quantize(%x, %0, %1, 'uint8[0,255] *x1 float32 float32:reciprocal:round-zp int'): uint8[s0, 8]
return (%2)""",
    )


@pytest.mark.numeric
@pytest.mark.property
@given(st.data())
def test_quantize_has_the_bits_of_the_source(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(SEEDS))
    shape, dtype = data.draw(SHAPES), data.draw(st.sampled_from(INTEGERS))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    count = data.draw(st.sampled_from([shape[axis], shape[axis], 1]))
    low, high = data.draw(st.sampled_from([(-127, 127), (-8, 7), (0, 120)]))
    low = max(low, torch.iinfo(dtype).min)
    constant = data.draw(st.booleans())
    column = data.draw(st.sampled_from([(count,), (count, 1)]))
    source = Source()
    scale = scales(column, data.draw(SCALE_TYPES))
    grid = [1] * len(shape)
    grid[axis] = count
    x = hard_numbers(shape, data.draw(st.sampled_from(FLOATS)), scale.reshape(grid))
    zero = torch.randint(low, high + 1, column).to(data.draw(ZERO_TYPES) or torch.int8)
    q = source.b.call(
        d.quantize_per_channel.default,
        source.arg(x),
        source.either(scale, constant=constant),
        source.either(zero, constant=constant),
        axis,
        low,
        high,
        dtype,
    )

    assert ops_of(assert_same_bits(source, q)) == ["quantize"]


@pytest.mark.numeric
@pytest.mark.property
@given(st.data())
def test_dequantize_has_the_bits_of_the_source(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(SEEDS))
    shape, dtype = data.draw(SHAPES), data.draw(st.sampled_from([*INTEGERS, torch.int32]))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    count = data.draw(st.sampled_from([shape[axis], shape[axis], 1]))
    real = data.draw(st.sampled_from([None, torch.float64, *FLOATS]))
    kind, constant = data.draw(ZERO_TYPES), data.draw(st.booleans())
    scale = scales((count,), data.draw(SCALE_TYPES))
    wide = data.draw(st.booleans())
    zero = None
    if kind is not None:
        limit = 2**30 if wide and kind is not torch.float32 else 100
        zero = torch.randint(-limit, limit, (count,)).to(kind) * data.draw(st.integers(0, 1))
    source = Source()
    q = source.arg(codes(shape, dtype))
    y = source.b.call(
        d.dequantize_per_channel.default,
        q,
        source.either(scale, constant=constant),
        None if zero is None else source.either(zero, constant=constant),
        axis,
        torch.iinfo(dtype).min,
        torch.iinfo(dtype).max,
        dtype,
        out_dtype=real,
    )

    program = assert_same_bits(source, y)
    if zero is None or (constant and kind is torch.int64 and not zero.any()):
        assert ops_of(program) == ["dequantize"]


@pytest.mark.numeric
@pytest.mark.parametrize("zero", [torch.int64, torch.int32])
def test_a_weight_of_every_tool_is_normalized(zero: torch.dtype) -> None:
    for scale, low in ((torch.float32, -127), (torch.float64, -128), (torch.bfloat16, -128)):
        source = Source()
        w = source.b.const("w", codes((4, 3, 2, 2), torch.int8))
        s = source.b.const("s", scales((4,), scale))
        z = source.b.const("z", torch.randint(-128, 127, (4,)).to(zero))
        op = d.dequantize_per_channel.default
        y = source.b.call(op, w, s, z, 0, low, 127, torch.int8, out_dtype=torch.bfloat16)

        assert ops_of(assert_same_bits(source, y)) == ["dequantize"]


@pytest.mark.parametrize(("stored", "zero"), [(torch.int8, torch.int8), (torch.uint8, torch.uint8)])
def test_refuses_a_subtraction_that_wraps(stored: torch.dtype, zero: torch.dtype) -> None:
    source = Source()
    q, s = source.arg(codes((4, 8), stored)), source.b.const("s", scales((4,)))
    z = source.b.const("z", torch.tensor([1, 0, 100, 0], dtype=zero))
    low, high = torch.iinfo(stored).min, torch.iinfo(stored).max
    y = source.b.call(d.dequantize_per_channel.default, q, s, z, 0, low, high, stored)

    miss = only_miss(assert_same_bits(source, y))
    assert (miss.code, miss.at.node) == (MissCode.ARITHMETIC, z.name)


@pytest.mark.numeric
def test_constants_that_do_not_wrap_are_seen() -> None:
    source = Source()
    q = source.b.const("q", torch.randint(-100, 101, (4, 8), dtype=torch.int8))
    s = source.b.const("s", scales((4,)))
    z = source.b.const("z", torch.tensor([1, 0, -20, 5], dtype=torch.int8))
    y = source.b.call(d.dequantize_per_channel.default, q, s, z, 0, -128, 127, torch.int8)

    assert ops_of(assert_same_bits(source, y)) == ["dequantize"]


def test_refuses_a_zero_point_without_bounds() -> None:
    source = Source()
    q, s = source.arg(codes((4, 8), torch.int8)), source.b.const("s", scales((4,)))
    z = source.arg(torch.randint(-100, 100, (4,)))
    y = source.b.call(d.dequantize_per_channel.default, q, s, z, 0, -128, 127, torch.int8)

    assert only_miss(assert_same_bits(source, y)).code is MissCode.ARITHMETIC


def test_refuses_a_zero_point_that_is_wider_than_the_scale() -> None:
    source = Source()
    x, s = source.arg(torch.randn(4, 8)), source.b.const("s", scales((4,)))
    z = source.b.const("z", torch.randn(4, dtype=torch.float64))
    q = source.b.call(d.quantize_per_channel.default, x, s, z, 0, -128, 127, torch.int8)

    assert only_miss(assert_same_bits(source, q)).code is MissCode.DTYPE


def test_refuses_float8_and_integer_scales() -> None:
    for dtype, scale, code in (
        (torch.float8_e4m3fn, torch.ones(4), MissCode.ARITHMETIC),
        (torch.int8, torch.ones(4, dtype=torch.int64), MissCode.DTYPE),
    ):
        source = Source()
        x, s = source.arg(torch.randn(4, 8)), source.b.const("s", scale)
        z = source.b.const("z", torch.zeros(4, dtype=torch.int64))
        q = source.b.call(d.quantize_per_channel.default, x, s, z, 0, -120, 120, dtype)

        assert only_miss(assert_same_bits(source, q)).code is code


def test_refuses_channels_that_are_counted_at_run_time() -> None:
    source = Source()
    q = source.arg(codes((5, 8), torch.int8), ("B", 8))
    s = source.arg(scales((5,)), ("C",))
    y = source.b.call(d.dequantize_per_channel.default, q, s, None, 0, -128, 127, torch.int8)

    assert only_miss(normalize(source.done(y))).code is MissCode.SHAPE


@pytest.mark.parametrize(
    ("scale", "zero", "axis", "complaint"),
    [
        ((3,), (3,), 0, r"axis 0 of \(4, 8\) has 4 channels"),
        ((4,), (3,), 0, r"a zero point of shape \(3,\) does not fit: 4 entries"),
        ((4, 8), (4,), 0, "it is not a list"),
        ((), (), 0, "it is not a list"),
        ((8,), (8,), -3, "axis -3 is not an axis"),
    ],
)
def test_what_does_not_fit_is_an_error_at_the_users_line(
    scale: tuple[int, ...], zero: tuple[int, ...], axis: int, complaint: str
) -> None:
    source = Source()
    q = source.arg(codes((4, 8), torch.int8))
    s = source.b.const("s", scales(scale))
    z = source.b.const("z", torch.ones(zero, dtype=torch.int64))
    op = d.dequantize_per_channel.default
    y = source.b.call(op, q, s, z, axis, -128, 127, torch.int8)
    y.meta[SOURCE_META], y.meta[MODULE_META] = "model.py:7: y = self.fc(x)", "net.fc"

    error = assert_never_runs(source, y, complaint, RuntimeError, IndexError)
    assert error.where is not None
    assert "net.fc, model.py:7: y = self.fc(x)" in error.where
    assert isinstance(error, BlockError) or axis == -3


def test_a_float8_tensor_can_never_run() -> None:
    source = Source()
    q = source.arg(torch.randn(4, 8).to(torch.float8_e4m3fn))
    s = source.b.const("s", scales((4,)))
    op = d.dequantize_per_channel.default
    y = source.b.call(op, q, s, None, 0, -448, 448, torch.float8_e4m3fn)

    complaint = "it multiplies float8_e4m3fn by float32"
    assert_never_runs(source, y, complaint, RuntimeError, says="Float8")
