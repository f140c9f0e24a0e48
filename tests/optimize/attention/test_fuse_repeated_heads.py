from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.attention import Heads
from tests.support.cases.propagate import applied, only_miss

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.optimize.attention.fuse_repeated_heads import FuseRepeatedHeads

aten = torch.ops.aten


@pytest.mark.numeric
def test_golden_attention_reads_shared_heads_where_they_lie() -> None:
    g = Heads(rows="l", positions=5)
    out = g.attention(g.q, g.repeated(g.k), g.repeated(g.v), scale=0.3, is_causal=True)
    program = g.done(out)

    assert applied(program, FuseRepeatedHeads, l=4).fired == {"fuse-repeated-heads": 1}
    assert_expected_inline(
        to_text(program.graph),
        """\
%q: float32[2, 6, s0, 8]
%k: float32[2, 2, 5, 8]
%v: float32[2, 2, 5, 8]
%0 = aten.scaled_dot_product_attention(%q, %k, %v, None, 0.0, True, scale=0.3, enable_gqa=True): float32[2, 6, s0, 8]
%1 = aten.neg(%0): float32[2, 6, s0, 8]
return (%1)""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("rows", [1, 4])
def test_values_stay(dtype: torch.dtype, rows: int) -> None:
    g = Heads(rows=rows, positions=33, dtype=dtype, width=(16, 16))
    mask = g.b.arg("mask", torch.float32, 2, 1, rows, 33)
    typed = g.b.call(aten._to_copy.default, mask, dtype=dtype)
    program = g.done(g.attention(g.q, g.repeated(g.k), g.repeated(g.v), attn_mask=typed))

    assert applied(program, FuseRepeatedHeads).modified


@pytest.mark.numeric
@pytest.mark.parametrize(
    "view", [aten.view.default, aten._unsafe_view.default, aten.reshape.default]
)
@pytest.mark.parametrize("sizes", [(1, 4), (3, 1), (1, 1), (8, 2)], ids=str)
def test_any_number_of_heads_however_it_is_spelled(view: object, sizes: tuple[int, int]) -> None:
    g = Heads(*sizes, rows=2, positions=1)
    keys, values = (g.repeated(x, view=view) for x in (g.k, g.v))

    assert applied(g.done(g.attention(g.q, keys, values)), FuseRepeatedHeads).modified


@pytest.mark.numeric
def test_repetition_without_a_copy_and_with_other_readers() -> None:
    g = Heads(heads=1, group=4)
    b, h, s, d = g.k.meta["val"].shape
    single = g.b.call(aten.unsqueeze.default, g.k, -3)
    spread = g.b.call(aten.expand.default, single, [-1, -1, 4, -1, -1])
    keys = g.b.call(aten.reshape.default, spread, [b, h * 4, s, d])
    values = g.repeated(g.v)
    program = g.done(g.attention(g.q, keys, values), keys, values)

    assert applied(program, FuseRepeatedHeads).modified


@pytest.mark.numeric
@pytest.mark.parametrize("case", ["plain", "twice"])
def test_what_is_no_business_of_it(case: str) -> None:
    g = Heads(heads=2, group=1)
    program = g.done(*(g.attention(g.q, g.k, g.v) for _ in range(1 + (case == "twice"))))
    result = applied(program, FuseRepeatedHeads)

    assert not result.modified
    assert result.misses == []


@pytest.mark.numeric
def test_refuses_keys_alone() -> None:
    g = Heads(heads=2, group=3)
    values = g.b.arg("w", torch.float32, 2, 6, 5, 8)
    out = g.attention(g.q, g.repeated(g.k), values)

    miss = only_miss(g.done(out), FuseRepeatedHeads)
    assert (miss.code, miss.at) == (MissCode.PATTERN, out)
    assert "only one of keys and values" in miss.reason


@pytest.mark.numeric
def test_refuses_heads_that_differ() -> None:
    g = Heads(heads=2, group=6)
    values = g.b.arg("w", torch.float32, 2, 4, 5, 8)
    out = g.attention(g.q, g.repeated(g.k, 6), g.repeated(values, 3))

    miss = only_miss(g.done(out), FuseRepeatedHeads)
    assert (miss.code, miss.at) == (MissCode.SHAPE, out)
    assert "12 heads of queries, 12 of keys repeated from 2, values from 4" in miss.reason


@pytest.mark.numeric
def test_refuses_what_repeats_once_more() -> None:
    g = Heads(heads=2, group=6)
    keys, values = (g.repeated(x, 3) for x in (g.k, g.v))
    out = g.attention(g.q, keys, values, enable_gqa=True)

    miss = only_miss(g.done(out), FuseRepeatedHeads)
    assert (miss.code, miss.at) == (MissCode.ARGUMENT, out)


@pytest.mark.numeric
def test_refuses_heads_in_another_order() -> None:
    # All heads one after the other, several times: head 0 and 1 read shared heads 0 and 1.
    g = Heads(heads=2, group=3)
    b, h, s, d = g.k.meta["val"].shape

    def tiled(x: torch.fx.Node) -> torch.fx.Node:
        single = g.b.call(aten.unsqueeze.default, x, 1)
        spread = g.b.call(aten.expand.default, single, [b, 3, h, s, d])
        return g.b.call(aten.reshape.default, spread, [b, 3 * h, s, d])

    result = applied(g.done(g.attention(g.q, tiled(g.k), tiled(g.v))), FuseRepeatedHeads)
    assert not result.modified


@pytest.mark.numeric
def test_refuses_heads_in_another_order_of_one_shape() -> None:
    # With as many repetitions as heads, only the place of the new axis tells the two apart.
    g = Heads(heads=2, group=2)
    b, h, s, d = g.k.meta["val"].shape

    def tiled(x: torch.fx.Node) -> torch.fx.Node:
        single = g.b.call(aten.unsqueeze.default, x, 1)
        spread = g.b.call(aten.expand.default, single, [b, 2, h, s, d])
        return g.b.call(aten.reshape.default, spread, [b, 2 * h, s, d])

    result = applied(g.done(g.attention(g.q, tiled(g.k), tiled(g.v))), FuseRepeatedHeads)
    assert not result.modified


@pytest.mark.numeric
def test_refuses_positions_that_are_repeated() -> None:
    g = Heads(heads=2, group=2, positions=4)
    b, h, s, d = g.k.meta["val"].shape

    def longer(x: torch.fx.Node) -> torch.fx.Node:
        single = g.b.call(aten.unsqueeze.default, x, 3)
        spread = g.b.call(aten.expand.default, single, [b, h, s, 2, d])
        return g.b.call(aten.reshape.default, spread, [b, h * 2, s, d])

    result = applied(g.done(g.attention(g.q, longer(g.k), longer(g.v))), FuseRepeatedHeads)
    assert not result.modified


@pytest.mark.numeric
def test_refuses_a_reader_of_strides() -> None:
    g = Heads()
    out = g.attention(g.q, g.repeated(g.k), g.repeated(g.v))
    rigid = g.b.call(aten.as_strided.default, out, [2, 6, 1, 8], [48, 8, 8, 1])
    miss = only_miss(g.done(rigid), FuseRepeatedHeads)

    assert (miss.code, miss.at) == (MissCode.ORDER, rigid)


@pytest.mark.numeric
@pytest.mark.parametrize("shape", [(1, 6, 1, 8), (6, 6, 8), (2, 2, 6, 1, 8)], ids=str)
def test_refuses_queries_that_are_spread(shape: tuple[int, ...]) -> None:
    g = Heads()
    query = g.b.arg("x", torch.float32, *shape)
    out = g.attention(query, g.repeated(g.k), g.repeated(g.v))
    miss = only_miss(g.done(out), FuseRepeatedHeads)

    assert (miss.code, miss.at) == (MissCode.SHAPE, out)
    assert "broadcast against keys" in miss.reason
