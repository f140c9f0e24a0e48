from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from tests.support.sources.affine import BLOCKS_OR_NOTHING
from tests.support.sources.dialects import (
    FLOATS,
    SEEDS,
    Source,
    assert_same_bits,
    fired,
    hard_numbers,
    only_miss,
)

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.normalize import normalize
from qfuse.normalize.importers.torchao.choose_float8 import NormalizeChooseFloat8

choose = torch.ops.torchao.choose_scale_float8.default


def test_golden_a_scale_without_a_zero_point() -> None:
    source = Source()
    x = source.b.arg("x", torch.bfloat16, "B", 8)
    program = normalize(source.done(source.b.call(choose, x, [1, 8])))

    assert fired(program) == [NormalizeChooseFloat8.name]
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: bfloat16[s0, 8]
%0 = qfuse.choose_qparams(%x, 'ao-float8 float8_e4m3fn[-448,448] 1x* eps=0.0 float32 int32'): (float32[s0, 1], int32[s0, 1])
%1 = getitem(%0, 0): float32[s0, 1]
return (%1)""",
    )


@pytest.mark.numeric
@pytest.mark.property
@given(st.data())
def test_values_have_the_bits_of_the_source(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(SEEDS))
    shape, block = data.draw(BLOCKS_OR_NOTHING.filter(lambda case: case[1] != [1, 1]))
    dtype = data.draw(st.sampled_from([torch.float8_e4m3fn, torch.float8_e5m2]))
    source = Source()
    x = source.arg(hard_numbers(shape, data.draw(st.sampled_from(FLOATS))))
    program = assert_same_bits(source, source.b.call(choose, x, block, dtype))

    assert fired(program) == [NormalizeChooseFloat8.name]


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (([3, 8], torch.float8_e4m3fnuz), MissCode.DTYPE),
        (([3, 8], torch.float8_e4m3fn, torch.float8_e8m0fnu), MissCode.DTYPE),
        (([3, 8], torch.float8_e4m3fn, torch.float32, 0.5), MissCode.ARGUMENT),
        (([3, 8], torch.float8_e4m3fn, torch.float32, None, 2.0), MissCode.ARGUMENT),
    ],
)
def test_refuses_what_the_language_does_not_say(args: tuple[object, ...], code: MissCode) -> None:
    source = Source()
    y = source.b.call(choose, source.arg(torch.randn(3, 8)), *args)  # type: ignore[arg-type]

    assert only_miss(assert_same_bits(source, y)).code is code


def test_refuses_a_block_of_ones_which_reduces_everything() -> None:
    source = Source()
    y = source.b.call(choose, source.arg(torch.randn(3, 8)), [1, 8])
    y.update_arg(1, [1, 1])

    assert only_miss(normalize(source.done(y))).code is MissCode.GRANULARITY
