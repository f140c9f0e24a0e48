from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from tests.support.sources.affine import BLOCKS, TARGETS, grid_of, param_shape
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
from tests.support.sources.qparams import assert_never_runs, draw_params

from qfuse.ir.errors import BlockError
from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.normalize import normalize

quantize = torch.ops.torchao.quantize_affine.default
aten = torch.ops.aten
ZERO_TYPES = (torch.int8, torch.int32, torch.int64, torch.float32, torch.bfloat16)


def test_golden_per_token_under_dynamic_sizes() -> None:
    source = Source()
    x = source.b.arg("x", torch.float32, "B", "S", 8)
    s, z = source.b.arg("s", torch.float32, "B", "S"), source.b.arg("z", torch.int8, "B", "S")
    q = source.b.call(quantize, x, [1, 1, 8], s, z, torch.int8)
    program = normalize(source.done(q))

    assert fired(program) == ["normalize-quantize-affine"]
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, s1, 8]
%s: float32[s0, s1]
%z: int8[s0, s1]
%0 = aten.unsqueeze(%s, 2): float32[s0, s1, 1]
%1 = aten.unsqueeze(%z, 2): int8[s0, s1, 1]
%2 = qfuse.quantize(%x, %0, %1, 'int8[-128,127] 1x1x* float32 float32:reciprocal:round-zp int'): int8[s0, s1, 8]
return (%2)""",
    )


def test_golden_a_block_of_symbols_is_the_whole_axis() -> None:
    source = Source()
    x = source.b.arg("x", torch.bfloat16, "B", 8)
    rows = source.b.call(aten.sym_size.int, x, 0)
    s, z = source.b.const("s", scales((1, 1))), source.b.const("z", torch.ones(1, 1).char())
    q = source.b.call(quantize, x, [rows, 8], s, z, torch.int8, -127, 127)
    program = normalize(source.done(q))

    assert_expected_inline(
        to_text(program.graph),
        """\
%x: bfloat16[s0, 8]
const %s: float32[1, 1]
const %z: int8[1, 1]
%0 = qfuse.quantize(%x, %s, %z, 'int8[-127,127] *x* bfloat16 float32:reciprocal:round-zp int'): int8[s0, 8]
return (%0)""",
    )


@pytest.mark.numeric
@pytest.mark.property
@given(st.data())
def test_values_have_the_bits_of_the_source(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(SEEDS))
    shape, block = data.draw(BLOCKS)
    target, codes = data.draw(TARGETS)
    params = draw_params(data, param_shape(shape, block, data), ZERO_TYPES)
    step = float(params.scale.double().mean())
    x = hard_numbers(shape, data.draw(st.sampled_from(FLOATS)), step)
    source = Source()
    q = source.b.call(
        quantize,
        source.arg(x),
        block,
        *params.into(source),
        target,
        *codes,
    )

    program = assert_same_bits(source, q)
    compute = torch.promote_types(x.dtype, params.scale.dtype)
    sound = params.adds_in(x)
    ends = torch.iinfo(torch.int16).max
    sound &= target is not torch.int16 or compute not in FLOATS[1:] or codes[1] != ends
    assert ops_of(program) == ["quantize"] * sound


@pytest.mark.numeric
@pytest.mark.parametrize("block", [[-1, 8], [-1, 1]])
def test_minus_one_is_the_whole_axis(block: list[int]) -> None:
    source = Source()
    x = source.arg(hard_numbers((3, 8), torch.float32))
    grid = grid_of((3, 8), block)
    s, z = source.b.const("s", scales(grid)), source.b.const("z", torch.ones(grid).int())

    program = assert_same_bits(source, source.b.call(quantize, x, block, s, z, torch.int8))
    assert ops_of(program) == ["quantize"]


def test_refuses_float8_since_it_rounds_to_integers_first() -> None:
    source = Source()
    x = source.arg(torch.randn(3, 8))
    s, z = source.b.const("s", scales((1,))), source.b.const("z", torch.zeros(1))
    q = source.b.call(quantize, x, [3, 8], s, z, torch.float8_e4m3fn)

    assert only_miss(assert_same_bits(source, q)).code is MissCode.ARITHMETIC


def test_refuses_bounds_that_bfloat16_rounds_out_of_the_type() -> None:
    source = Source()
    x = source.arg(torch.randn(3, 8).bfloat16())
    s = source.b.const("s", scales((1,), torch.bfloat16))
    z = source.b.const("z", torch.zeros(1))
    z_int = source.b.call(aten._to_copy.default, z, dtype=torch.int32)
    q = source.b.call(quantize, x, [3, 8], s, z_int, torch.int16)

    miss = only_miss(assert_same_bits(source, q))
    assert miss.reason == "its bound 32767 is not exact in bfloat16, in which it clamps"


def test_refuses_a_zero_point_that_lifts_the_arithmetic() -> None:
    source = Source()
    x = source.arg(torch.randn(3, 8).bfloat16())
    s, z = source.b.const("s", scales((1,), torch.bfloat16)), source.b.const("z", torch.ones(1))
    q = source.b.call(quantize, x, [3, 8], s, z, torch.int8)

    miss = only_miss(assert_same_bits(source, q))
    assert (miss.code, miss.at.node) == (MissCode.DTYPE, z.name)


def test_refuses_a_range_that_is_not_whole() -> None:
    source = Source()
    x = source.arg(torch.randn(3, 8))
    s, z = source.b.const("s", scales((1,))), source.b.const("z", torch.ones(1).int())
    q = source.b.call(quantize, x, [3, 8], s, z, torch.int8, -7.5, 7.5)

    assert only_miss(assert_same_bits(source, q)).code is MissCode.RANGE


def test_refuses_blocks_that_are_known_at_run_time() -> None:
    source = Source()
    x = source.arg(torch.randn(5, 8), ("B", 8))
    other = source.arg(torch.randn(5), ("C",))
    rows = source.b.call(aten.sym_size.int, other, 0)
    s, z = source.b.const("s", scales((1, 1))), source.b.const("z", torch.ones(1, 1).int())
    q = source.b.call(aten._to_copy.default, x, dtype=torch.int8)
    # Torch itself asks whether the blocks tile the data, so only an edited graph gets here.
    q.target, q.args, q.kwargs = quantize, (x, [rows, 8], s, z, torch.int8), {}

    assert only_miss(normalize(source.done(q))).code is MissCode.SHAPE


@pytest.mark.parametrize(
    ("block", "scale", "zero", "codes", "complaint"),
    [
        ([1, 8], (4,), (3,), (), r"a scale of shape \(4,\) does not fit: 3 entries"),
        ([1, 8], (3,), (2,), (), r"a zero point of shape \(2,\) does not fit: 3 entries"),
        ([1, 3], (9,), (9,), (), "blocks of 3 do not tile an axis of 8"),
        ([1, 1, 8], (3,), (3,), (), "has another rank than data"),
        ([1, 8], (3,), (0,), (), "it has no zero point, and adds one"),
        ([1, 8], (3,), None, (), "it has no zero point, and adds one"),
        ([1, 8], (3,), (3,), (-129, 127), r"the range \[-129, 127\] exceeds int8"),
    ],
)
def test_what_can_never_run_is_an_error(
    block: list[int],
    scale: tuple[int, ...],
    zero: tuple[int, ...] | None,
    codes: tuple[int, ...],
    complaint: str,
) -> None:
    source = Source()
    x = source.arg(torch.randn(3, 8))
    s = source.b.const("s", scales(scale))
    z = None if zero is None else source.b.const("z", torch.ones(zero, dtype=torch.int32))
    q = source.b.call(aten._to_copy.default, x, dtype=torch.int8)
    # The op finds most of this out when it is traced, so such a graph comes from an editing tool.
    q.target, q.args, q.kwargs = quantize, (x, block, s, z, torch.int8, *codes), {}

    error = assert_never_runs(source, q, complaint, AssertionError, RuntimeError, TypeError)
    assert ("fit" in complaint) <= isinstance(error, BlockError)
