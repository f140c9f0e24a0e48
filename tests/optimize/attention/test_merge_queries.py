from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.attention import Heads, matches_double
from tests.support.cases.propagate import only_miss

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.optimize.attention.fuse_repeated_heads import FuseRepeatedHeads
from qfuse.optimize.attention.merge_queries import MergeQueries

aten = torch.ops.aten


@pytest.mark.numeric
def test_golden_queries_of_a_group_are_rows() -> None:
    g = Heads(batch="b", positions="s")
    program = g.done(g.attention(g.q, g.k, g.v, scale=0.25, enable_gqa=True))

    assert matches_double(program, MergeQueries, b=3, s=9).fired == {"merge-queries": 1}
    assert_expected_inline(
        to_text(program.graph),
        """\
%q: float32[s0, 6, 1, 8]
%k: float32[s0, 2, s1, 8]
%v: float32[s0, 2, s1, 8]
%0 = aten.sym_size.int(%q, 0): SymInt
%1 = aten.reshape(%q, (%0, 2, 3, 8)): float32[s0, 2, 3, 8]
%2 = aten.scaled_dot_product_attention(%1, %k, %v, None, scale=0.25): float32[s0, 2, 3, 8]
%3 = aten.reshape(%2, (%0, 6, 1, 8)): float32[s0, 6, 1, 8]
%4 = aten.neg(%3): float32[s0, 6, 1, 8]
return (%4)""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("sizes", [(8, 2), (1, 16), (3, 5)], ids=str)
def test_values_are_as_near_as_before(dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    g = Heads(*sizes, positions=65, dtype=dtype, width=(32, 32))
    program = g.done(g.attention(g.q, g.k, g.v, enable_gqa=True))

    assert matches_double(program, MergeQueries).modified


@pytest.mark.numeric
@pytest.mark.parametrize("shape", [(1, 7), (1, 1, 7), (2, 1, 1, 7), (1, 1, 1, 7)], ids=str)
@pytest.mark.parametrize("told", [False, True], ids=["added", "chosen"])
def test_a_mask_that_holds_for_all_heads(shape: tuple[int, ...], told: bool) -> None:
    g = Heads(positions=7)
    mask = g.b.arg("mask", torch.float32, *shape)
    if told:
        # The first position is always seen, so that no row is masked altogether.
        first = torch.tensor([True] + [False] * 6).expand(shape)
        seen = g.b.call(aten.gt.Scalar, mask, 0.0)
        mask = g.b.call(aten.logical_or.default, seen, g.b.const("first", first.contiguous()))
    program = g.done(g.attention(g.q, g.k, g.v, attn_mask=mask, enable_gqa=True))

    assert matches_double(program, MergeQueries).modified


@pytest.mark.numeric
def test_values_of_another_width() -> None:
    g = Heads(width=(8, 12))
    program = g.done(g.attention(g.q, g.k, g.v, enable_gqa=True))

    assert matches_double(program, MergeQueries).modified


@pytest.mark.numeric
def test_views_of_the_result_are_made_again() -> None:
    g = Heads()
    out = g.attention(g.q, g.repeated(g.k), g.repeated(g.v))
    turned = g.b.call(aten.permute.default, out, [0, 2, 1, 3])
    program = g.done(g.b.call(aten.view.default, turned, [2, 1, 48]), out)

    fired = matches_double(program, FuseRepeatedHeads, MergeQueries).fired
    assert fired == {"fuse-repeated-heads": 1, "merge-queries": 1}


@pytest.mark.numeric
def test_what_is_no_business_of_it() -> None:
    g = Heads(group=1)
    result = matches_double(g.done(g.attention(g.q, g.k, g.v)), MergeQueries)

    assert not result.modified
    assert result.misses == []


@pytest.mark.numeric
@pytest.mark.parametrize("rows", [2, "l"])
def test_refuses_several_tokens(rows: int | str) -> None:
    g = Heads(rows=rows)
    out = g.attention(g.q, g.k, g.v, enable_gqa=True)
    miss = only_miss(g.done(out), MergeQueries, l=2)

    assert (miss.code, miss.at) == (MissCode.SHAPE, out)
    assert "several tokens" in miss.reason


@pytest.mark.numeric
def test_refuses_a_causal_mask() -> None:
    # It lets the first row see the first position alone, and the second row one more.
    g = Heads()
    out = g.attention(g.q, g.k, g.v, enable_gqa=True, is_causal=True)
    miss = only_miss(g.done(out), MergeQueries)

    assert (miss.code, miss.at) == (MissCode.ARGUMENT, out)


@pytest.mark.numeric
def test_refuses_a_mask_per_head() -> None:
    g = Heads()
    mask = g.b.arg("mask", torch.float32, 1, 6, 1, 5)
    out = g.attention(g.q, g.k, g.v, attn_mask=mask, enable_gqa=True)
    miss = only_miss(g.done(out), MergeQueries)

    assert (miss.code, miss.at) == (MissCode.SHAPE, mask)


@pytest.mark.numeric
def test_refuses_one_head_per_group() -> None:
    g = Heads(group=1)
    out = g.attention(g.q, g.k, g.v, enable_gqa=True)
    miss = only_miss(g.done(out), MergeQueries)

    assert (miss.code, miss.at) == (MissCode.SHAPE, out)


@pytest.mark.numeric
def test_refuses_a_reader_of_strides() -> None:
    g = Heads()
    out = g.attention(g.q, g.k, g.v, enable_gqa=True)
    rigid = g.b.call(aten.as_strided.default, out, [2, 6, 1, 8], [48, 8, 8, 1])
    miss = only_miss(g.done(rigid), MergeQueries)

    assert (miss.code, miss.at) == (MissCode.ORDER, rigid)


@pytest.mark.numeric
@pytest.mark.parametrize("batches", [(1, 4, 4), (4, 1, 1), (4, 1, 4), (4, 4, 1)])
def test_refuses_batches_that_are_spread(batches: tuple[int, ...]) -> None:
    g = Heads()
    heads, rows = (6, 2, 2), (1, 5, 5)
    operands = [
        g.b.arg(f"x{i}", torch.float32, batch, heads[i], rows[i], 8)
        for i, batch in enumerate(batches)
    ]
    out = g.attention(*operands, enable_gqa=True)
    miss = only_miss(g.done(out), MergeQueries)

    assert (miss.code, miss.at) == (MissCode.SHAPE, out)
    assert "batches of queries, keys and values are" in miss.reason
