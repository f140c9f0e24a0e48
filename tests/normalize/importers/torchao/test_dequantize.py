from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from tests.support.sources.affine import BLOCKS_OR_NOTHING, TARGETS, UINT4, param_shape
from tests.support.sources.dialects import (
    FLOATS,
    SEEDS,
    Source,
    assert_same_bits,
    codes,
    fired,
    only_miss,
    ops_of,
    scales,
)
from tests.support.sources.qparams import assert_never_runs, draw_params

from qfuse.ir.errors import BlockError
from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.normalize import normalize

dequantize = torch.ops.torchao.dequantize_affine.default
ZERO_TYPES = (torch.int8, torch.int32, torch.float32, torch.bfloat16)


def test_golden_groups_of_an_int4_weight() -> None:
    source = Source()
    w = source.b.const("w", torch.randint(-8, 8, (4, 8), dtype=torch.int8))
    s = source.b.const("s", scales((4, 2), torch.bfloat16))
    z = source.b.const("z", torch.ones(4, 2, dtype=torch.int8))
    args = (w, [1, 4], s, z, torch.int8, -8, 7, torch.bfloat16)
    program = normalize(source.done(source.b.call(dequantize, *args)))

    assert fired(program) == ["normalize-dequantize-affine"]
    assert_expected_inline(
        to_text(program.graph),
        """\
const %w: int8[4, 8]
const %s: bfloat16[4, 2]
const %z: int8[4, 2]
%0 = qfuse.dequantize(%w, %s, %z, 'int8[-8,7] 1x4 bfloat16 bfloat16:reciprocal:round-zp int'): bfloat16[4, 8]
return (%0)""",
    )


@pytest.mark.numeric
@pytest.mark.property
@given(st.data())
def test_values_have_the_bits_of_the_source(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(SEEDS))
    shape, block = data.draw(BLOCKS_OR_NOTHING)
    target, ends = data.draw(TARGETS)
    form = param_shape(shape, block, data)
    params = draw_params(data, form, ZERO_TYPES, spreads=(0, 9, 300), optional=True)
    stored = torch.uint8 if target is UINT4 else target
    real = data.draw(st.sampled_from([*FLOATS, None]))
    source = Source()
    y = source.b.call(
        dequantize,
        source.arg(codes(shape, stored)),
        block,
        *params.into(source),
        target,
        *(ends or (None, None)),
        *([] if real is None else [real]),
    )

    program = assert_same_bits(source, y)
    real = real or torch.float32
    same_type = torch.promote_types(real, params.scale.dtype) == real
    no_zero = params.constant and (params.zero is None or not params.zero.any())
    if same_type or (target is not torch.int16 and no_zero):
        assert ops_of(program) == ["dequantize"]


@pytest.mark.numeric
def test_an_int8_weight_with_a_float32_scale_gives_bfloat16() -> None:
    source = Source()
    w = source.b.const("w", codes((4, 8), torch.int8))
    s = source.b.const("s", scales((4, 1)))
    z = source.b.const("z", torch.randint(-128, 128, (4, 1), dtype=torch.int8))
    args = (w, [1, 8], s, z, torch.int8, -128, 127, torch.bfloat16)
    program = assert_same_bits(source, source.b.call(dequantize, *args))

    assert " bfloat16 float32:" in to_text(program.graph)


def test_refuses_a_difference_that_the_output_type_rounds() -> None:
    source = Source()
    q = source.arg(codes((4, 8), torch.int16))
    s, z = source.b.const("s", scales((4,))), source.b.const("z", torch.ones(4).short())
    args = (q, [1, 8], s, z, torch.int16, -32768, 32767, torch.bfloat16)

    miss = only_miss(assert_same_bits(source, source.b.call(dequantize, *args)))
    assert miss.code is MissCode.ARITHMETIC


def test_refuses_stored_numbers_that_the_output_type_rounds() -> None:
    source = Source()
    q, s = source.arg(codes((4, 8), torch.int16)), source.b.const("s", scales((4,)))
    args = (q, [1, 8], s, None, torch.int16, -32768, 32767, torch.float16)

    miss = only_miss(assert_same_bits(source, source.b.call(dequantize, *args)))
    assert miss.reason.startswith("it converts to float16 before it multiplies in float32")


def test_refuses_a_scale_that_is_no_float() -> None:
    source = Source()
    q, s = source.arg(codes((4, 8), torch.int8)), source.b.const("s", torch.ones(4).int())

    y = source.b.call(dequantize, q, [1, 8], s, None, torch.int8)
    assert only_miss(assert_same_bits(source, y)).code is MissCode.DTYPE


def test_refuses_parameters_that_have_no_view() -> None:
    source = Source()
    q, s = source.arg(codes((4, 8), torch.int8)), source.arg(scales((4, 2)))
    turned = source.b.call(torch.ops.aten.t.default, s)
    y = source.b.call(dequantize, q, [1, 4], s, None, torch.int8)
    y.update_arg(2, turned)

    assert only_miss(normalize(source.done(y))).code is MissCode.SHAPE


@pytest.mark.parametrize(
    ("block", "scale", "dtype", "float_dtype", "complaint"),
    [
        ([1, 8], (5,), torch.int8, torch.float32, r"a scale of shape \(5,\) does not fit"),
        ([1, 5], (4,), torch.int8, torch.float32, "do not tile"),
        ([1, 8], (4,), torch.uint8, torch.float32, "a dequantize of uint8 is given int8"),
        ([1, 8], (4,), torch.int8, torch.float64, "it returns float64"),
        ([1, 8], (4,), torch.int64, torch.float32, "a dequantize of int64 is given int8"),
    ],
)
def test_what_can_never_run_is_an_error(
    block: list[int],
    scale: tuple[int, ...],
    dtype: torch.dtype,
    float_dtype: torch.dtype,
    complaint: str,
) -> None:
    source = Source()
    q, s = source.arg(codes((4, 8), torch.int8)), source.b.const("s", scales(scale))
    y = source.b.call(torch.ops.aten._to_copy.default, q, dtype=float_dtype)
    # The op finds this out when it is traced, so such a graph comes from an editing tool.
    y.target, y.kwargs = dequantize, {}
    y.args = (q, block, s, None, dtype, None, None, float_dtype)

    error = assert_never_runs(source, y, complaint, AssertionError, RuntimeError, ValueError)
    assert ("fit" in complaint) <= isinstance(error, BlockError)


@pytest.mark.numeric
def test_a_float8_tensor_is_dequantized() -> None:
    source = Source()
    q, s = source.arg(torch.randn(4, 8).to(torch.float8_e4m3fn)), source.b.const("s", scales((4,)))
    y = source.b.call(dequantize, q, [1, 8], s, None, torch.float8_e4m3fn)

    assert ops_of(assert_same_bits(source, y)) == ["dequantize"]
