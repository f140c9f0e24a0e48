from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from tests.support.sources.affine import BLOCKS_OR_NOTHING, TARGETS
from tests.support.sources.dialects import (
    FLOATS,
    SEEDS,
    Source,
    assert_same_bits,
    fired,
    only_miss,
    ops_of,
    run,
)
from tests.support.sources.qparams import assert_never_runs, uneven

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.normalize import normalize

choose = torch.ops.torchao.choose_qparams_affine.default
quantize = torch.ops.torchao.quantize_affine.default
dequantize = torch.ops.torchao.dequantize_affine.default
MAPPINGS = ("SYMMETRIC", "SYMMETRIC_NO_CLIPPING_ERR", "ASYMMETRIC")


def test_golden_a_lower_rank_is_seen_through() -> None:
    source = Source()
    x = source.b.arg("x", torch.bfloat16, "B", "S", 8)
    block = [1, 1, 8]
    args = (x, "ASYMMETRIC", block, torch.int8, -128, 127, None, None, torch.int8)
    pair = source.b.call(choose, *args)
    s, z = source.b.item(pair, 0), source.b.item(pair, 1)
    q = source.b.call(quantize, x, block, s, z, torch.int8, -128, 127)
    rest = (torch.int8, -128, 127, torch.bfloat16)
    y = source.b.call(dequantize, q, block, s, z, *rest)
    program = normalize(source.done(y))

    assert fired(program) == [
        "normalize-choose-affine",
        "normalize-quantize-affine",
        "normalize-dequantize-affine",
    ]
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: bfloat16[s0, s1, 8]
%0 = qfuse.choose_qparams(%x, 'ao-asymmetric int8[-128,127] 1x1x* eps=1.1754943508222875e-38 bfloat16 int8'): (bfloat16[s0, s1, 1], int8[s0, s1, 1])
%1 = getitem(%0, 0): bfloat16[s0, s1, 1]
%2 = getitem(%0, 1): int8[s0, s1, 1]
%3 = qfuse.quantize(%x, %1, %2, 'int8[-128,127] 1x1x* bfloat16 bfloat16:reciprocal:round-zp int'): int8[s0, s1, 8]
%4 = qfuse.dequantize(%3, %1, %2, 'int8[-128,127] 1x1x* bfloat16 bfloat16:reciprocal:round-zp int'): bfloat16[s0, s1, 8]
return (%4)""",
    )


def test_golden_symmetric_zero_points_vanish() -> None:
    source = Source()
    x = source.b.arg("x", torch.float32, "B", 8)
    args = (x, "SYMMETRIC", [1, 8], torch.int8, -128, 127, 1e-7, torch.float32, torch.int8)
    pair = source.b.call(choose, *args, keepdim=True)
    s, z = source.b.item(pair, 0), source.b.item(pair, 1)
    q = source.b.call(quantize, x, [1, 8], s, z, torch.int8, -128, 127)
    program = normalize(source.done(q, s))

    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, 8]
%0 = qfuse.choose_qparams(%x, 'ao-symmetric int8[-128,127] 1x* eps=1e-07 float32 int8'): (float32[s0, 1], int8[s0, 1])
%1 = getitem(%0, 0): float32[s0, 1]
%2 = qfuse.quantize(%x, %1, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): int8[s0, 8]
return (%2, %1)""",
    )


@pytest.mark.numeric
@pytest.mark.property
@given(st.data())
def test_values_have_the_bits_of_the_source(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(SEEDS))
    shape, block = data.draw(BLOCKS_OR_NOTHING.filter(lambda case: case[1] != [1, 1]))
    target, ends = data.draw(TARGETS)
    zero_types = st.sampled_from([None, torch.int8, torch.int32, torch.int64, torch.float32])
    scale_types = st.sampled_from([None, *FLOATS, torch.float64])
    source = Source()
    pair = source.b.call(
        choose,
        source.arg(uneven(shape, data.draw(st.sampled_from([*FLOATS, torch.float64])))),
        data.draw(st.sampled_from(MAPPINGS)),
        block,
        target,
        *(ends or (None, None)),
        data.draw(st.sampled_from([None, 1e-5, 2**-12, 0.3])),
        data.draw(scale_types),
        data.draw(zero_types),
        data.draw(st.booleans()) if block else False,
    )
    program = assert_same_bits(source, source.b.item(pair, 0), source.b.item(pair, 1))

    assert ops_of(program) == ["choose_qparams"]


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_dynamic_quantization_under_dynamic_sizes(
    dtype: torch.dtype, mapping: str, keepdim: bool
) -> None:
    source = Source()
    x = source.arg(uneven((5, 7, 8), dtype), ("B", "S", 8))
    block, rest = [1, 1, 8], (torch.int8, -128, 127)
    pair = source.b.call(choose, x, mapping, block, *rest, None, None, torch.int8, keepdim)
    s, z = source.b.item(pair, 0), source.b.item(pair, 1)
    q = source.b.call(quantize, x, block, s, z, *rest)
    y = source.b.call(dequantize, q, block, s, z, *rest, dtype)

    program = assert_same_bits(source, q, y)
    assert ops_of(program) == ["choose_qparams", "quantize", "dequantize"]
    assert ops_of(program, "aten") == []


@pytest.mark.parametrize("keepdim", [False, True])
def test_refuses_a_block_of_ones_which_reduces_everything(keepdim: bool) -> None:
    source = Source()
    x = source.arg(torch.randn(3, 8))
    pair = source.b.call(choose, x, "SYMMETRIC", [1, 8], torch.int8, keepdim=keepdim)
    s = source.b.item(pair, 0)
    pair.update_arg(2, [1, 1])
    program = source.done(s)
    if not keepdim:
        assert run(program, source.inputs)[0].shape == ()

    miss = only_miss(normalize(program))
    assert (miss.code, miss.anchor.node) == (MissCode.GRANULARITY, pair.name)


def test_refuses_a_pair_that_is_read_as_a_whole() -> None:
    source = Source()
    x = source.arg(torch.randn(3, 8))
    pair = source.b.call(choose, x, "SYMMETRIC", [1, 8], torch.int8)

    assert only_miss(normalize(source.done(pair))).code is MissCode.PATTERN


def test_refuses_a_range_that_is_not_whole() -> None:
    source = Source()
    x = source.arg(torch.randn(3, 8))
    pair = source.b.call(choose, x, "SYMMETRIC", [1, 8], torch.int8, -7.5, 7.5)

    assert only_miss(assert_same_bits(source, source.b.item(pair, 0))).code is MissCode.RANGE


@pytest.mark.parametrize(
    ("index", "value", "complaint"),
    [
        (0, None, "its input is not a tensor"),
        (1, "SYMETRIC", "there is no mapping 'SYMETRIC'"),
        (2, [1, 3], "do not tile an axis of 8"),
        (3, torch.int64, "torchao does not quantize to int64"),
        (5, 128, r"the range \[-128, 128\] exceeds int8"),
    ],
)
def test_what_can_never_run_is_an_error(index: int, value: object, complaint: str) -> None:
    source = Source()
    x = source.arg(torch.randn(3, 8))
    pair = source.b.call(choose, x, "SYMMETRIC", [1, 8], torch.int8, -128, 127)
    s = source.b.item(pair, 0)
    pair.update_arg(index, value)  # type: ignore[arg-type]

    assert_never_runs(source, s, complaint, AssertionError, AttributeError, ValueError)
