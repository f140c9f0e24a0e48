from __future__ import annotations

from dataclasses import replace

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

from qfuse.ir.events import MissCode, Missed
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.spec import Arithmetic, QuantSpec
from qfuse.normalize import normalize
from qfuse.normalize.aten.cast_rules import CASTS
from qfuse.normalize.aten.qdq.fold_cast_into_quantize import FoldCastIntoQuantize

cast = torch.ops.aten._to_copy.default
d = torch.ops.quantized_decomposed
TYPES = st.sampled_from([*FLOATS, torch.float64])
SPEC = QuantSpec(torch.int8, -128, 127, (1, None))


def test_golden_autocast_before_a_quantize() -> None:
    source = Source()
    x = source.b.arg("x", torch.bfloat16, "B", 8)
    wide = source.b.call(cast, x, dtype=torch.float32)
    q = source.b.call(d.quantize_per_tensor.default, wide, 0.02, 3, -128, 127, torch.int8)
    program = normalize(source.done(q))

    assert fired(program) == ["normalize-quantize-per-tensor", FoldCastIntoQuantize.name]
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: bfloat16[s0, 8]
const %quantize_per_tensor_default_scale: float64[1, 1]
const %quantize_per_tensor_default_zero_point: int64[1, 1]
%0 = qfuse.quantize(%x, %quantize_per_tensor_default_scale, %quantize_per_tensor_default_zero_point, 'int8[-128,127] *x* bfloat16 float32:reciprocal:round-zp int'): int8[s0, 8]
return (%0)""",
    )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int32])
def test_refuses_a_cast_of_stored_numbers(dtype: torch.dtype) -> None:
    source = Source()
    wide = source.b.call(cast, source.b.arg("x", dtype, 4, 8), dtype=torch.float32)
    q = source.b.call(d.quantize_per_tensor.default, wide, 0.1, 0, -128, 127, torch.int8)
    program = normalize(source.done(q))

    assert fired(program) == ["normalize-quantize-per-tensor"]
    (miss,) = program.log.of(Missed)
    assert (miss.rule, miss.code) == (FoldCastIntoQuantize.name, MissCode.DTYPE)


@pytest.mark.numeric
@pytest.mark.property
@given(st.data())
def test_values_have_the_bits_of_two_steps(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(SEEDS))
    first, real, compute = data.draw(TYPES), data.draw(TYPES), data.draw(TYPES)
    spec = replace(SPEC, float_dtype=real, arithmetic=Arithmetic(compute))
    source = Source()
    x, s = source.arg(hard_numbers((5, 33), first)), source.b.const("s", scales((5, 1)))
    zero = source.b.const("z", torch.randint(-128, 128, (5, 1)))
    wide = source.b.call(cast, x, dtype=real)
    q = source.b.call(ops.quantize, wide, s, zero, str(spec))
    program = assert_same_bits(source, q, dialects=(CASTS,))

    exact = torch.promote_types(first, real) == real
    assert (ops_of(program, "aten") == []) == exact


def test_refuses_a_cast_that_rounds() -> None:
    source = Source()
    x, s = source.arg(torch.randn(5, 8)), source.b.const("s", scales((5, 1)))
    low = source.b.call(cast, x, dtype=torch.bfloat16)
    q = source.b.call(ops.quantize, low, s, None, str(replace(SPEC, float_dtype=torch.bfloat16)))

    miss = only_miss(assert_same_bits(source, q, dialects=(CASTS,)))
    assert (miss.code, miss.at.node) == (MissCode.DTYPE, low.name)


def test_refuses_a_cast_of_integers() -> None:
    source = Source()
    x = source.arg(torch.randint(-9, 9, (5, 8)))
    s = source.b.const("s", scales((5, 1)))
    q = source.b.call(ops.quantize, source.b.call(cast, x, dtype=torch.float32), s, None, str(SPEC))

    assert only_miss(assert_same_bits(source, q, dialects=(CASTS,))).code is MissCode.DTYPE


def test_refuses_a_tensor_that_the_scale_is_chosen_from() -> None:
    source = Source()
    x = source.arg(torch.randn(5, 8).bfloat16())
    wide = source.b.call(cast, x, dtype=torch.float32)
    choose = "ao-symmetric int8[-128,127] 1x* eps=1e-07 float32 int8"
    pair = source.b.call(ops.choose_qparams, wide, choose)
    q = source.b.call(ops.quantize, wide, source.b.item(pair, 0), None, str(SPEC))

    miss = only_miss(assert_same_bits(source, q, dialects=(CASTS,)))
    assert (miss.code, miss.at.node) == (MissCode.SHARED, wide.name)
