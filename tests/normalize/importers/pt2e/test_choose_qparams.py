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
    only_miss,
    ops_of,
)
from tests.support.sources.qparams import assert_never_runs, uneven

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.normalize import normalize
from qfuse.normalize.importers.pt2e.choose_qparams import (
    NormalizeChoosePerTensor,
    NormalizeChoosePerToken,
)

d = torch.ops.quantized_decomposed
RANGES = [
    (0, 255, torch.uint8),
    (0, 127, torch.uint8),
    (-128, 127, torch.int8),
    (-8, 7, torch.int8),
]


def test_golden_one_number_gets_the_rank_of_the_data() -> None:
    source = Source()
    x = source.b.arg("x", torch.float32, "B", 8)
    pair = source.b.call(d.choose_qparams.tensor, x, 0, 255, 2**-12, torch.uint8)
    s, z = source.b.item(pair, 0), source.b.item(pair, 1)
    q = source.b.call(d.quantize_per_tensor.tensor, x, s, z, 0, 255, torch.uint8)
    y = source.b.call(d.dequantize_per_tensor.tensor, q, s, z, 0, 255, torch.uint8)
    program = normalize(source.done(y, s))

    assert fired(program)[0] == "normalize-choose-per-tensor"
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, 8]
%0 = qfuse.choose_qparams(%x, 'decomposed-affine uint8[0,255] *x* eps=0.000244140625 float64 int64'): (float64[1, 1], int64[1, 1])
%1 = getitem(%0, 0): float64[1, 1]
%2 = aten.view(%1, (1)): float64[1]
%3 = getitem(%0, 1): int64[1, 1]
%4 = qfuse.quantize(%x, %1, %3, 'uint8[0,255] *x* float32 float32:reciprocal:round-zp int'): uint8[s0, 8]
%5 = qfuse.dequantize(%4, %1, %3, 'uint8[0,255] *x* float32 float32:reciprocal:round-zp int'): float32[s0, 8]
return (%5, %2)""",
    )


@pytest.mark.numeric
@pytest.mark.property
@given(st.data())
def test_per_tensor_has_the_bits_of_the_source(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(SEEDS))
    shape = data.draw(st.sampled_from([(), (1,), (7,), (3, 5), (1, 1), (2, 3, 4)]))
    low, high, dtype = data.draw(st.sampled_from(RANGES))
    op = data.draw(st.sampled_from([d.choose_qparams.tensor, d.choose_qparams_symmetric.tensor]))
    eps = data.draw(st.sampled_from([2**-12, 1e-5, 1.1920928955078125e-07, 0.3]))
    source = Source()
    x = source.arg(uneven(shape, data.draw(st.sampled_from(FLOATS))))
    pair = source.b.call(op, x, low, high, eps, dtype)
    program = assert_same_bits(source, source.b.item(pair, 0), source.b.item(pair, 1))

    assert fired(program) == [NormalizeChoosePerTensor.name]


@pytest.mark.numeric
@pytest.mark.property
@given(st.data())
def test_per_token_has_the_bits_of_the_source(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(SEEDS))
    shape = data.draw(st.sampled_from([(1,), (7,), (3, 5), (0, 4), (4, 1), (2, 3, 4)]))
    name = data.draw(st.sampled_from(["", "_impl"]))
    op = getattr(d, f"{'_' * bool(name)}choose_qparams_per_token_asymmetric{name}").default
    source = Source()
    x = source.arg(uneven(shape, data.draw(st.sampled_from([*FLOATS, torch.float64]))))
    pair = source.b.call(op, x, torch.int8)
    program = assert_same_bits(source, source.b.item(pair, 0), source.b.item(pair, 1))

    assert fired(program) == [NormalizeChoosePerToken.name]


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", FLOATS)
def test_dynamic_quantization_has_the_bits_of_the_source(dtype: torch.dtype) -> None:
    source = Source()
    x = source.arg(uneven((3, 16), dtype))
    pair = source.b.call(d.choose_qparams.tensor, x, 0, 255, 2**-12, torch.uint8)
    s, z = source.b.item(pair, 0), source.b.item(pair, 1)
    q = source.b.call(d.quantize_per_tensor.tensor, x, s, z, 0, 255, torch.uint8)
    args = (q, s, z, 0, 255, torch.uint8)
    y = source.b.call(d.dequantize_per_tensor.tensor, *args, out_dtype=dtype)

    program = assert_same_bits(source, q, y)
    assert ops_of(program) == ["choose_qparams", "quantize", "dequantize"]
    assert ops_of(program, "aten") == []


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_a_zero_point_that_is_always_zero_is_none(dtype: torch.dtype) -> None:
    source = Source()
    x = source.arg(uneven((3, 16), torch.float32))
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    pair = source.b.call(d.choose_qparams_symmetric.tensor, x, low, high, 1e-5, dtype)
    s, z = source.b.item(pair, 0), source.b.item(pair, 1)
    q = source.b.call(d.quantize_per_tensor.tensor, x, s, z, low, high, dtype)

    has_zero_point = "getitem(%0, 1)" in to_text(assert_same_bits(source, q).graph)
    assert has_zero_point is (dtype is torch.uint8)


def test_refuses_a_pair_that_is_read_as_a_whole() -> None:
    source = Source()
    x = source.arg(torch.randn(3, 8))
    pair = source.b.call(d.choose_qparams.tensor, x, 0, 255, 1e-5, torch.uint8)

    assert only_miss(normalize(source.done(pair))).code is MissCode.PATTERN


def test_refuses_a_choice_per_token_for_another_type() -> None:
    source = Source()
    x = source.arg(torch.randn(3, 8))
    pair = source.b.call(d.choose_qparams_per_token_asymmetric.default, x, torch.uint8)

    assert only_miss(assert_same_bits(source, source.b.item(pair, 0))).code is MissCode.DTYPE


def test_refuses_a_choice_per_token_without_tokens() -> None:
    source = Source()
    x = source.arg(torch.randn(()))
    pair = source.b.call(d.choose_qparams_symmetric.tensor, x, -128, 127, 1e-5, torch.int8)
    s = source.b.item(pair, 0)
    # Its shape function rejects a tensor without axes, so only an edited graph gets here.
    pair.target, pair.args = d.choose_qparams_per_token_asymmetric.default, (x, torch.int8)

    assert only_miss(normalize(source.done(s))).code is MissCode.DTYPE


@pytest.mark.parametrize("ends", [(1, 255), (-128, -1), (0, 0)])
def test_a_range_without_zero_can_never_run(ends: tuple[int, int]) -> None:
    source = Source()
    x = source.arg(torch.randn(3, 8))
    op = d.choose_qparams_symmetric.tensor
    pair = source.b.call(op, x, *ends, 1e-5, torch.int16)

    complaint = "does not reach both sides of 0"
    assert_never_runs(source, source.b.item(pair, 0), complaint, AssertionError)
