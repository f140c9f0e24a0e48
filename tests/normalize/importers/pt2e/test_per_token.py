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
    run,
    scales,
)
from tests.support.sources.qparams import draw_params

from qfuse.ir.errors import BlockError, NormalizeError
from qfuse.ir.events import MissCode, Noted
from qfuse.ir.graph.text import to_text
from qfuse.normalize import normalize

d = torch.ops.quantized_decomposed
SHAPES = st.sampled_from([(7,), (1,), (3, 5), (4, 4), (1, 9), (9, 1), (2, 3, 4), (1, 3, 4), (0, 4)])
ZERO_TYPES = (torch.int64, torch.int8, torch.float32, torch.bfloat16, torch.float64)
FULL = (-128, 127, torch.int8)


def per_token(shape: tuple[int, ...], data: st.DataObject) -> tuple[int, ...]:
    """A shape that broadcasts to one entry per token."""
    form = (*shape[:-1], 1)
    while form[0] == 1 and len(form) > 1 and data.draw(st.booleans()):
        form = form[1:]
    return form


def test_golden_the_choice_and_its_readers() -> None:
    source = Source()
    x = source.b.arg("x", torch.bfloat16, "B", "S", 8)
    pair = source.b.call(d.choose_qparams_per_token_asymmetric.default, x, torch.int8)
    s, z = source.b.item(pair, 0), source.b.item(pair, 1)
    q = source.b.call(d.quantize_per_token.default, x, s, z, *FULL)
    y = source.b.call(d.dequantize_per_token.default, q, s, z, *FULL, torch.bfloat16)
    program = normalize(source.done(y))

    assert fired(program) == [
        "normalize-choose-per-token",
        "normalize-quantize-per-token",
        "normalize-dequantize-per-token",
    ]
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: bfloat16[s0, s1, 8]
%0 = qfuse.choose_qparams(%x, 'token-asymmetric int8[-128,127] 1x1x* eps=1.1920928955078125e-07 float64 int64'): (float64[s0, s1, 1], int64[s0, s1, 1])
%1 = getitem(%0, 0): float64[s0, s1, 1]
%2 = getitem(%0, 1): int64[s0, s1, 1]
%3 = qfuse.quantize(%x, %1, %2, 'int8[-128,127] 1x1x* bfloat16 float64:reciprocal:zp-round int'): int8[s0, s1, 8]
%4 = qfuse.dequantize(%3, %1, %2, 'int8[-128,127] 1x1x* bfloat16 float32:reciprocal:zp-round int'): bfloat16[s0, s1, 8]
return (%4)""",
    )


@pytest.mark.numeric
@pytest.mark.property
@given(st.data())
def test_quantize_has_the_bits_of_the_source(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(SEEDS))
    shape, dtype = data.draw(SHAPES), data.draw(st.sampled_from(INTEGERS))
    params = draw_params(data, per_token(shape, data), ZERO_TYPES)
    x = hard_numbers(shape, data.draw(st.sampled_from([*FLOATS, torch.float64])), params.scale)
    source = Source()
    q = source.b.call(
        d.quantize_per_token.default,
        source.arg(x),
        *params.into(source),
        *data.draw(st.sampled_from([(-127, 127), (-8, 7)] if dtype.is_signed else [(0, 255)])),
        dtype,
    )

    program = assert_same_bits(source, q)
    assert ops_of(program) == ["quantize"] * params.adds_in(x)


@pytest.mark.numeric
@pytest.mark.property
@given(st.data())
def test_dequantize_has_the_bits_of_the_source(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(SEEDS))
    shape, dtype = data.draw(SHAPES), data.draw(st.sampled_from([*INTEGERS, torch.int32]))
    params = draw_params(data, per_token(shape, data), ZERO_TYPES, spreads=(0, 20))
    source = Source()
    y = source.b.call(
        d.dequantize_per_token.default,
        source.arg(codes(shape, dtype)),
        *params.into(source),
        torch.iinfo(dtype).min,
        torch.iinfo(dtype).max,
        dtype,
        data.draw(st.sampled_from([torch.float64, *FLOATS])),
    )

    program = assert_same_bits(source, y)
    assert params.zero is not None
    narrow = params.zero.dtype is torch.int64 and dtype is not torch.int32
    if params.constant and params.is_wide and narrow:
        assert ops_of(program) == ["dequantize"]


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_the_choice_that_promises_float64_is_read_as_what_it_gives(dtype: torch.dtype) -> None:
    source = Source()
    x = source.arg(torch.randn(2, 3, 33).to(dtype))
    pair = source.b.call(d.choose_qparams_per_token.default, x, torch.int8)
    s, z = source.b.item(pair, 0), source.b.item(pair, 1)
    q = source.b.call(d.quantize_per_token.default, x, s, z, *FULL)
    y = source.b.call(d.dequantize_per_token.default, q, s, z, *FULL, torch.float32)
    program = assert_same_bits(source, q, y)

    assert s.meta["val"].dtype is torch.float64
    assert ops_of(program) == ["choose_qparams", "quantize", "choose_qparams", "dequantize"]
    assert ops_of(program, "quantized_decomposed") == []


def test_refuses_a_choice_that_is_changed_on_its_way() -> None:
    source = Source()
    x = source.arg(torch.randn(3, 8))
    pair = source.b.call(d.choose_qparams_per_token.default, x, torch.int8)
    s, z = source.b.item(pair, 0), source.b.item(pair, 1)
    double = source.b.call(torch.ops.aten.mul.Tensor, s, 2.0)
    q = source.b.call(d.quantize_per_token.default, x, double, z, *FULL)
    program = assert_same_bits(source, q)

    assert only_miss(program).code is MissCode.DTYPE
    notes = [note.text for note in program.log.of(Noted)]
    assert len(notes) == 2
    assert "returns float64" in notes[0]


def test_refuses_parameters_without_axes() -> None:
    source = Source()
    x = source.arg(torch.randn(1, 8).bfloat16())
    s, z = source.b.const("s", scales(())), source.b.const("z", torch.tensor(3))
    q = source.b.call(d.quantize_per_token.default, x, s, z, *FULL)

    assert only_miss(assert_same_bits(source, q)).code is MissCode.SHAPE


def test_refuses_parameters_that_are_broadcast_differently() -> None:
    source = Source()
    x = source.arg(torch.randn(4, 4))
    s = source.b.const("s", scales((4, 1)))
    z = source.b.const("z", torch.arange(4).reshape(1, 4))
    q = source.b.call(d.quantize_per_token.default, x, s, z, *FULL)

    miss = only_miss(assert_same_bits(source, q))
    assert miss.code is MissCode.SHAPE
    assert miss.reason.startswith("scale and zero point are broadcast differently")


@pytest.mark.numeric
def test_a_list_of_scales_runs_along_the_last_axis_as_in_the_source() -> None:
    source = Source()
    x = source.arg(hard_numbers((4, 4), torch.float32))
    s, z = source.b.const("s", scales((4,))), source.b.const("z", torch.arange(4))
    q = source.b.call(d.quantize_per_token.default, x, s, z, *FULL)

    assert " *x1 " in to_text(assert_same_bits(source, q).graph)


def test_refuses_a_dtype_argument_that_is_not_the_tensors() -> None:
    source = Source()
    q = source.arg(codes((3, 8), torch.uint8))
    s, z = source.b.const("s", scales((3, 1))), source.b.const("z", torch.ones(3, 1))
    y = source.b.call(d.dequantize_per_token.default, q, s, z, *FULL, torch.float32)

    assert only_miss(assert_same_bits(source, y)).code is MissCode.DTYPE


@pytest.mark.parametrize("form", [(3,), (2, 1), (1, 3, 1), (1, 1)])
def test_scales_that_do_not_fit_are_an_error(form: tuple[int, ...]) -> None:
    source = Source()
    x = source.arg(torch.randn(3, 8))
    s, z = source.b.const("s", scales(form)), source.b.const("z", torch.ones(form))
    q = source.b.call(d.quantize_per_token.default, x, s, z, *FULL)
    program = source.done(q)
    with_right_shape = True
    try:
        with_right_shape = run(program, source.inputs)[0].shape == (3, 8)
    except (AssertionError, RuntimeError):
        with_right_shape = False
    assert not with_right_shape

    with pytest.raises(BlockError, match="do not fit data of shape"):
        normalize(program)


def test_a_choice_for_another_type_than_int8_can_never_run() -> None:
    source = Source()
    x = source.arg(torch.randn(3, 8))
    pair = source.b.call(d.choose_qparams_per_token.default, x, torch.uint8)
    s, z = source.b.item(pair, 0), source.b.item(pair, 1)
    q = source.b.call(d.quantize_per_token.default, x, s, z, 0, 255, torch.uint8)

    with pytest.raises(NormalizeError, match="it chooses only for int8, not for uint8"):
        normalize(source.done(q))


@pytest.mark.numeric
@pytest.mark.parametrize("real", FLOATS)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_a_choice_in_a_narrow_float_is_dequantized_in_float32(
    dtype: torch.dtype, real: torch.dtype
) -> None:
    x = torch.randn(5, 3, 257) * torch.tensor([1e-30, 1e-4, 1.0, 30.0, 1e3])[:, None, None]
    x[0, 0] = 0
    source = Source()
    pair = source.b.call(
        d.choose_qparams_per_token_asymmetric.default, source.arg(x.to(dtype)), torch.int8
    )
    s, z = source.b.item(pair, 0), source.b.item(pair, 1)
    q = source.arg(codes(tuple(x.shape), torch.int8))
    y = source.b.call(d.dequantize_per_token.default, q, s, z, *FULL, real)
    program = assert_same_bits(source, y)

    # A float32 scale times a difference has 33 bits, and two roundings of these may differ.
    narrow = dtype is not torch.float64 and (real is torch.float32 or dtype is not torch.float32)
    assert (" float32:" in to_text(program.graph)) == narrow
    assert (" float64:" in to_text(program.graph)) == (not narrow)


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("scale", "zero", "real", "narrow"),
    [
        (0.5, 3, torch.float32, True),
        (0.5, 2000, torch.float32, False),
        (0.5, 2**40, torch.float32, False),
        (0.1, 3, torch.float32, False),
        (0.5, 3, torch.bfloat16, False),
        (0.5, 3, torch.float64, False),
    ],
)
def test_a_constant_scale_is_read_in_float32_where_that_is_exact(
    scale: float, zero: int, real: torch.dtype, narrow: bool
) -> None:
    source = Source()
    s = source.b.const("s", torch.full((4, 1), scale, dtype=torch.float64))
    z = source.b.const("z", torch.full((4, 1), zero))
    q = source.arg(codes((4, 33), torch.int8))
    y = source.b.call(d.dequantize_per_token.default, q, s, z, *FULL, real)
    program = assert_same_bits(source, y)

    assert (" float32:" in to_text(program.graph)) == narrow
