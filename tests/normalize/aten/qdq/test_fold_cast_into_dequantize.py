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
    codes,
    fired,
    only_miss,
    ops_of,
    scales,
)

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.spec import Arithmetic, QuantSpec
from qfuse.normalize import normalize
from qfuse.normalize.aten.cast_rules import CASTS
from qfuse.normalize.aten.qdq.fold_cast_into_dequantize import FoldCastIntoDequantize

cast = torch.ops.aten._to_copy.default
d = torch.ops.quantized_decomposed
TYPES = st.sampled_from([*FLOATS, torch.float64])
SPEC = QuantSpec(torch.int8, -128, 127, (1, None))


def test_golden_autocast_after_a_dequantize() -> None:
    source = Source()
    q = source.b.arg("q", torch.int8, "B", 8)
    args = (0.02, 3, -128, 127, torch.int8)
    y = source.b.call(d.dequantize_per_tensor.default, q, *args)
    low = source.b.call(cast, y, dtype=torch.bfloat16)
    program = normalize(source.done(low, y))

    assert fired(program) == ["normalize-dequantize-per-tensor", FoldCastIntoDequantize.name]
    assert_expected_inline(
        to_text(program.graph),
        """\
%q: int8[s0, 8]
const %dequantize_per_tensor_default_scale: float64[1, 1]
const %dequantize_per_tensor_default_zero_point: int64[1, 1]
%0 = qfuse.dequantize(%q, %dequantize_per_tensor_default_scale, %dequantize_per_tensor_default_zero_point, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): float32[s0, 8]
%1 = qfuse.dequantize(%q, %dequantize_per_tensor_default_scale, %dequantize_per_tensor_default_zero_point, 'int8[-128,127] *x* bfloat16 float32:reciprocal:round-zp int'): bfloat16[s0, 8]
return (%1, %0)""",
    )


@pytest.mark.numeric
@pytest.mark.property
@given(st.data())
def test_values_have_the_bits_of_two_steps(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(SEEDS))
    compute, real, last = data.draw(TYPES), data.draw(TYPES), data.draw(TYPES)
    spec = replace(SPEC, float_dtype=real, arithmetic=Arithmetic(compute))
    source = Source()
    q, s = source.arg(codes((5, 33), torch.int8)), source.b.const("s", scales((5, 1)))
    zero = source.b.const("z", torch.randint(-128, 128, (5, 1)))
    y = source.b.call(ops.dequantize, q, s, zero, str(spec))
    program = assert_same_bits(source, source.b.call(cast, y, dtype=last), dialects=(CASTS,))

    one_step = torch.promote_types(compute, real) == real
    assert (ops_of(program, "aten") == []) == one_step


def test_refuses_a_second_rounding() -> None:
    source = Source()
    q, s = source.arg(codes((5, 8), torch.int8)), source.b.const("s", scales((5, 1)))
    spec = replace(SPEC, float_dtype=torch.bfloat16)
    y = source.b.call(ops.dequantize, q, s, None, str(spec))
    program = assert_same_bits(
        source, source.b.call(cast, y, dtype=torch.float16), dialects=(CASTS,)
    )

    miss = only_miss(program)
    assert (miss.code, miss.at.node) == (MissCode.ARITHMETIC, y.name)
    assert miss.reason.startswith("the dequantize rounds from float32 to bfloat16 already")


def test_refuses_a_cast_to_integers() -> None:
    source = Source()
    q, s = source.arg(codes((5, 8), torch.int8)), source.b.const("s", scales((5, 1)))
    y = source.b.call(ops.dequantize, q, s, None, str(SPEC))
    program = assert_same_bits(source, source.b.call(cast, y, dtype=torch.int32), dialects=(CASTS,))

    assert only_miss(program).code is MissCode.DTYPE


def test_refuses_a_cast_that_also_moves() -> None:
    source = Source()
    q = source.arg(codes((2, 3, 4, 5), torch.int8))
    s = source.b.const("s", scales((1, 1, 1, 1)))
    spec = SPEC.with_block((None,) * 4)
    y = source.b.call(ops.dequantize, q, s, None, str(spec))
    moved = source.b.call(cast, y, dtype=torch.bfloat16, memory_format=torch.channels_last)
    program = assert_same_bits(source, moved, dialects=(CASTS,))

    assert fired(program) == []
