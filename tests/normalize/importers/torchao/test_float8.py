from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from tests.support.sources.dialects import (
    FLOATS,
    SEEDS,
    Source,
    assert_same_bits,
    fired,
    hard_numbers,
    only_miss,
    ops_of,
    scales,
)
from tests.support.sources.qparams import assert_never_runs

from qfuse.ir.errors import BlockError
from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.normalize import normalize
from qfuse.normalize.importers.torchao.float8 import (
    NormalizeDequantizeFloat8,
    NormalizeQuantizeFloat8,
)

quantize = torch.ops.torchao.quantize_affine_float8_non_decomposed.default
dequantize = torch.ops.torchao.dequantize_affine_float8_non_decomposed.default
TYPES = st.sampled_from([torch.float8_e4m3fn, torch.float8_e5m2])
CASES = st.sampled_from(
    [
        *(((7,), (1,)), ((7,), ()), ((), ()), ((3, 8), (1,)), ((3, 8), (3, 1)), ((3, 8), (1, 8))),
        *(((3, 8), (3, 2)), ((4, 8), (2, 4)), ((2, 3, 8), (2, 3, 1)), ((2, 3, 8), (2, 3, 8))),
    ]
)
SCALE_TYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def test_golden_rows() -> None:
    source = Source()
    x, s = source.b.arg("x", torch.bfloat16, "B", 8), source.b.arg("s", torch.float32, "B", 1)
    q = source.b.call(quantize, x, s, torch.float8_e4m3fn)
    program = normalize(source.done(source.b.call(dequantize, q, s, torch.bfloat16)))

    assert fired(program) == [NormalizeQuantizeFloat8.name, NormalizeDequantizeFloat8.name]
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: bfloat16[s0, 8]
%s: float32[s0, 1]
%0 = qfuse.quantize(%x, %s, None, 'float8_e4m3fn[-448,448] 1x* bfloat16 float32:divide:round-zp int'): float8_e4m3fn[s0, 8]
%1 = qfuse.dequantize(%0, %s, None, 'float8_e4m3fn[-448,448] 1x* bfloat16 float32:divide:round-zp int'): bfloat16[s0, 8]
return (%1)""",
    )


@pytest.mark.numeric
@pytest.mark.property
@given(st.data())
def test_values_have_the_bits_of_the_source(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(SEEDS))
    (shape, form), dtype = data.draw(CASES), data.draw(TYPES)
    scale = scales(form, data.draw(SCALE_TYPES))
    x = hard_numbers(shape, data.draw(st.sampled_from([*FLOATS, torch.float64])))
    source = Source()
    s = source.either(scale, constant=data.draw(st.booleans()))
    q = source.b.call(quantize, source.arg(x), s, dtype)
    real = data.draw(st.sampled_from([*FLOATS, torch.float64]))
    program = assert_same_bits(source, q, source.b.call(dequantize, q, s, real))

    assert ops_of(program) == ["quantize", "dequantize"]


@pytest.mark.parametrize("scale", [torch.float64, torch.int32])
def test_refuses_other_scales(scale: torch.dtype) -> None:
    source = Source()
    x, s = source.arg(torch.randn(3, 8)), source.b.const("s", torch.ones(3, 1, dtype=scale))

    assert only_miss(assert_same_bits(source, source.b.call(quantize, x, s))).code is MissCode.DTYPE


def test_refuses_other_float8_types() -> None:
    source = Source()
    x, s = source.arg(torch.randn(3, 8)), source.b.const("s", scales((1,)))
    q = source.b.call(quantize, x, s, torch.float8_e5m2fnuz)

    assert only_miss(assert_same_bits(source, q)).code is MissCode.DTYPE


def test_refuses_a_scale_of_a_lower_rank() -> None:
    source = Source()
    x, s = source.arg(torch.randn(3, 3)), source.b.const("s", scales((3,)))

    assert only_miss(assert_same_bits(source, source.b.call(quantize, x, s))).code is MissCode.SHAPE


def test_scales_that_do_not_tile_are_an_error() -> None:
    source = Source()
    x, s = source.arg(torch.randn(3, 8)), source.b.const("s", scales((3, 3)))

    complaint, says = "3 scales do not tile an axis of 8", "not evenly divisible"
    error = assert_never_runs(
        source, source.b.call(quantize, x, s), complaint, ValueError, says=says
    )
    assert isinstance(error, BlockError)
