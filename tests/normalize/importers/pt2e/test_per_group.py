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
from tests.support.sources.qparams import assert_never_runs, draw_params

from qfuse.ir.errors import BlockError, NormalizeError
from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.normalize import normalize
from qfuse.normalize.importers.pt2e.per_group import NormalizeQuantizePerGroup

d = torch.ops.quantized_decomposed
CASES = st.sampled_from([((4, 6), 3), ((4, 6), 6), ((1, 8), 4), ((3, 4), 2), ((0, 4), 2)])
ZERO_TYPES = (torch.int32, torch.int64, torch.float32, torch.bfloat16)


def form_of(shape: tuple[int, int], group: int, data: st.DataObject) -> tuple[int, ...]:
    """A shape of parameters: per group as a matrix or flat, or one for all."""
    rows, columns = shape[0], shape[1] // group
    return data.draw(st.sampled_from([(rows, columns), (rows * columns,), (1,), (1, 1)]))


def test_golden_groups_become_blocks() -> None:
    source = Source()
    w = source.b.const("w", codes((4, 8), torch.int8) // 16)
    s = source.b.const("s", scales((8,)))
    z = source.b.const("z", torch.arange(8, dtype=torch.int32).reshape(4, 2))
    op = d.dequantize_per_channel_group.default
    y = source.b.call(op, w, s, z, -8, 7, torch.int8, 4, torch.bfloat16)
    program = normalize(source.done(y))

    assert fired(program) == ["normalize-dequantize-per-group"]
    assert_expected_inline(
        to_text(program.graph),
        """\
const %w: int8[4, 8]
const %z: int32[4, 2]
const %s_grid: float32[4, 2]
%0 = qfuse.dequantize(%w, %s_grid, %z, 'int8[-8,7] 1x4 bfloat16 float32:reciprocal:zp-round int'): bfloat16[4, 8]
return (%0)""",
    )


@pytest.mark.numeric
@pytest.mark.property
@given(st.data())
def test_quantize_has_the_bits_of_the_source(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(SEEDS))
    (shape, group), dtype = data.draw(CASES), data.draw(st.sampled_from(INTEGERS))
    form = form_of(shape, group, data)
    params = draw_params(data, form, ZERO_TYPES)
    step = float(params.scale.sum())
    x = hard_numbers(shape, data.draw(st.sampled_from(FLOATS)), step, nan=False)
    source = Source()
    q = source.b.call(
        d.quantize_per_channel_group.default,
        source.arg(x),
        *params.into(source),
        *data.draw(st.sampled_from([(-127, 127), (-8, 7)] if dtype.is_signed else [(0, 15)])),
        dtype,
        # A group longer than a row is the row, as long as there is one scale per row.
        group * 8 if group == shape[1] and form[-1] == 1 else group,
    )

    program = assert_same_bits(source, q)
    assert fired(program) == [NormalizeQuantizePerGroup.name] * params.adds_in(x)


@pytest.mark.numeric
@pytest.mark.property
@given(st.data())
def test_dequantize_has_the_bits_of_the_source(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(SEEDS))
    (shape, group), dtype = data.draw(CASES), data.draw(st.sampled_from(INTEGERS))
    form = form_of(shape, group, data)
    params = draw_params(data, form, ZERO_TYPES, spreads=(0, 20), optional=True)
    source = Source()
    y = source.b.call(
        d.dequantize_per_channel_group.default,
        source.arg(codes(shape, dtype)),
        *params.into(source),
        torch.iinfo(dtype).min,
        torch.iinfo(dtype).max,
        dtype,
        group,
        data.draw(st.sampled_from([torch.float64, *FLOATS])),
    )

    program = assert_same_bits(source, y)
    zero = params.zero
    integers = zero is None or not zero.dtype.is_floating_point
    if zero is None or (params.constant and params.is_wide and integers):
        assert ops_of(program) == ["dequantize"]


def test_refuses_parameters_that_are_broadcast_differently() -> None:
    source = Source()
    q, s = source.arg(codes((4, 8), torch.int8)), source.b.const("s", scales((4, 2)))
    z = source.b.const("z", torch.tensor([3], dtype=torch.int32))
    op = d.dequantize_per_channel_group.default
    y = source.b.call(op, q, s, z, -8, 7, torch.int8, 4, torch.float32)

    assert only_miss(assert_same_bits(source, y)).code is MissCode.SHAPE


def test_refuses_a_dtype_argument_that_is_not_the_tensors() -> None:
    source = Source()
    q, s = source.arg(codes((4, 8), torch.uint8)), source.b.const("s", scales((4, 2)))
    op = d.dequantize_per_channel_group.default
    y = source.b.call(op, q, s, None, -8, 7, torch.int8, 4, torch.float32)

    assert only_miss(assert_same_bits(source, y)).code is MissCode.DTYPE


def test_refuses_rows_of_a_length_that_is_known_at_run_time() -> None:
    source = Source()
    q = source.arg(codes((4, 8), torch.int8), (4, "K"))
    s = source.b.const("s", scales((4,)))
    y = source.b.call(d.dequantize_per_channel.default, q, s, None, 0, -8, 7, torch.int8)
    # Torch itself asks whether the group divides the row, so only an edited graph gets here.
    y.target = d.dequantize_per_channel_group.default
    y.args = (q, s, None, -8, 7, torch.int8, 4, torch.float32)

    assert only_miss(normalize(source.done(y))).code is MissCode.SHAPE


@pytest.mark.parametrize(
    ("shape", "count", "group", "kind", "complaint"),
    [
        ((4, 8), (4, 2), 3, NormalizeError, "groups of 3 do not tile rows of 8"),
        ((4, 8), (4, 2), 1, NormalizeError, "groups of 1 do not tile"),
        ((4, 8), (4, 3), 4, BlockError, r"a scale of shape \(4, 3\) does not fit: 8 entries"),
        ((2, 4, 8), (2, 4, 2), 4, NormalizeError, "the data has rank 3"),
    ],
)
def test_what_does_not_fit_is_an_error(
    shape: tuple[int, ...],
    count: tuple[int, ...],
    group: int,
    kind: type[NormalizeError],
    complaint: str,
) -> None:
    source = Source()
    q = source.arg(codes(shape, torch.int8))
    s = source.b.const("s", scales(count))
    y = source.b.call(torch.ops.aten._to_copy.default, q, dtype=torch.float32)
    # The op checks most of this when it is traced, so such a graph comes from an editing tool.
    y.target = d.dequantize_per_channel_group.default
    y.args, y.kwargs = (q, s, None, -8, 7, torch.int8, group, torch.float32), {}

    assert isinstance(assert_never_runs(source, y, complaint, AssertionError, RuntimeError), kind)
