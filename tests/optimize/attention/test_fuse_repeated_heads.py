from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.attention import ATTENTION, Heads
from tests.support.cases.grouped_heads import REPEATS, Repeat
from tests.support.cases.propagate import applied, only_miss
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.schema import arguments
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.views import shape_of
from qfuse.ir.quant.spec import ZeroPointDomain
from qfuse.optimize.attention.fuse_repeated_heads import FuseRepeatedHeads
from qfuse.optimize.schedule import MOVING_RULES, settle_rules
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.driver import apply_rules
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_tensor
from qfuse.testing.run import random_inputs, run

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
@pytest.mark.parametrize("sizes", [(1, 4), (3, 2), (1, 2), (8, 2)], ids=str)
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


GRIDS: dict[str, tuple[int | None, ...]] = {
    "tensor": (None, None, None, None),
    "batch": (1, None, None, None),
    "head": (None, 1, None, None),
    "heads": (None, 2, None, None),
    "token": (1, 1, 1, None),
    "features": (None, None, None, 1),
    "groups": (None, 1, 2, 4),
}


def quantized_heads(
    g: Heads, name: str, block: tuple[int | None, ...], repeat: Repeat, *, dynamic: bool = False
) -> Node:
    """Add keys or values that are quantized, repeated and dequantized."""
    shared = g.b.arg(f"{name}8", torch.int8, g.batch, g.heads, g.positions, 8)
    spec = per_tensor(4).with_block(block)
    grid = [int(n) for n in spec.grid(shape_of(shared))]
    scale = torch.rand(grid) * 0.02 + 1e-2
    node = g.b.arg(f"{name}_scale", torch.float32, *grid) if dynamic else None
    node = g.b.const(f"{name}_scale", scale) if node is None else node
    zero = g.b.const(f"{name}_zero", torch.randint(-9, 9, grid, dtype=torch.int32))
    real = g.b.call(ops.dequantize, shared, node, zero, str(spec))
    return repeat(g.b, real, g.group)


def spread(b: GraphBuilder, node: Node, group: int) -> Node:
    """Repeat one head without a copy."""
    batch, _, positions, width = node.meta["val"].shape
    return b.call(aten.expand.default, node, [batch, group, positions, width])


@pytest.mark.numeric
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("grid", list(GRIDS))
@pytest.mark.parametrize("repeat", ["expand", "repeat_interleave"])
def test_quantized_heads_are_not_copied(repeat: str, grid: str, dynamic: bool) -> None:
    g = Heads(heads=4, group=2, rows=3, positions=6)
    keys, values = (
        quantized_heads(g, name, GRIDS[grid], REPEATS[repeat], dynamic=dynamic) for name in "kv"
    )
    program = g.done(g.attention(g.q, keys, values, is_causal=True))
    before = clone(program)
    # Dequantizes first move below the copies.
    fired = settle_rules(program, MOVING_RULES, RewriteContext("optimize"))
    assert fired["sink-dequantize"] > 0
    assert applied(program, FuseRepeatedHeads).fired == {"fuse-repeated-heads": 1}
    (node,) = program.graph.find_nodes(op="call_function", target=ATTENTION)
    made = [as_dequantize(arguments(node)[name]) for name in ("key", "value")]
    assert all(each is not None and shape_of(each.node)[1] == 4 for each in made)
    assert not program.graph.find_nodes(op="call_function", target=aten.expand.default)
    inputs = random_inputs(before)
    ((want,), (got,)) = (run(each, inputs) for each in (before, program))
    assert torch.equal(got, want)


def test_golden_quantized_heads() -> None:
    g = Heads(rows="l")
    keys, values = (
        quantized_heads(g, name, GRIDS["head"], REPEATS["expand"], dynamic=True) for name in "kv"
    )
    program = g.done(g.attention(g.q, keys, values))
    settle_rules(program, MOVING_RULES, RewriteContext("optimize"))
    applied(program, FuseRepeatedHeads, l=4)
    assert_expected_inline(
        to_text(program.graph),
        """\
%q: float32[2, 6, s0, 8]
%k: float32[2, 2, 5, 8]
%v: float32[2, 2, 5, 8]
%k8: int8[2, 2, 5, 8]
%k_scale: float32[1, 2, 1, 1]
const %k_zero_1_1: int32[1, 2, 1, 1]
%v8: int8[2, 2, 5, 8]
%v_scale: float32[1, 2, 1, 1]
const %v_zero_1_1: int32[1, 2, 1, 1]
%0 = qfuse.dequantize(%k8, %k_scale, %k_zero_1_1, 'int8[-128,127] *x1x*x* float32 float32:reciprocal:round-zp int'): float32[2, 2, 5, 8]
%1 = qfuse.dequantize(%v8, %v_scale, %v_zero_1_1, 'int8[-128,127] *x1x*x* float32 float32:reciprocal:round-zp int'): float32[2, 2, 5, 8]
%2 = aten.scaled_dot_product_attention(%q, %0, %1, None, 0.0, False, scale=None, enable_gqa=True): float32[2, 6, s0, 8]
%3 = aten.neg(%2): float32[2, 6, s0, 8]
return (%3)""",
    )


@pytest.mark.numeric
def test_quantized_heads_that_are_spread_without_a_copy() -> None:
    g = Heads(heads=1, group=4)
    keys, values = (quantized_heads(g, name, GRIDS["token"], spread) for name in "kv")
    program = g.done(g.attention(g.q, keys, values))
    settle_rules(program, MOVING_RULES, RewriteContext("optimize"))
    assert applied(program, FuseRepeatedHeads).modified


@pytest.mark.numeric
def test_one_of_keys_and_values_is_quantized() -> None:
    g = Heads()
    keys = quantized_heads(g, "k", GRIDS["head"], REPEATS["expand"])
    program = g.done(g.attention(g.q, keys, g.repeated(g.v)))
    settle_rules(program, MOVING_RULES, RewriteContext("optimize"))
    assert applied(program, FuseRepeatedHeads).modified


def repeated_with_scales(g: Heads, name: str, block: tuple[int | None, ...]) -> Node:
    """Add repeated quantized values whose parameters are those of the copies."""
    shared = g.b.arg(f"{name}8", torch.int8, 2, g.heads, 5, 8)
    spec = per_tensor(4).with_block(block)
    grid = [int(n) for n in spec.grid((2, g.heads * g.group, 5, 8))]
    scale = g.b.const(f"{name}_scale", torch.rand(grid))
    return g.b.call(ops.dequantize, g.repeated(shared), scale, None, str(spec))


@pytest.mark.numeric
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_refuses_copies_of_one_head_with_different_scales(heads: int) -> None:
    g = Heads()
    keys, values = (repeated_with_scales(g, name, (None, heads, None, None)) for name in "kv")
    miss = only_miss(g.done(g.attention(g.q, keys, values)), FuseRepeatedHeads)

    assert (miss.code, miss.at) == (MissCode.GRANULARITY, keys)
    assert "copies of one head have different scales" in miss.reason


@pytest.mark.numeric
def test_refuses_scales_in_two_levels() -> None:
    g = Heads()
    keys, values = (repeated_with_scales(g, name, (None, 3, None, None)) for name in "kv")
    outer = g.b.const("outer", torch.rand(1, 1, 1, 1))
    found = as_dequantize(keys)
    assert found is not None
    spec = replace(found.params.spec, domain=ZeroPointDomain.NONE, outer=(None,) * 4)
    params = replace(found.params, spec=spec, outer_scale=outer)
    keys = g.b.call(ops.dequantize, *replace(found, params=params).call_args())
    miss = only_miss(g.done(g.attention(g.q, keys, values)), FuseRepeatedHeads)

    assert (miss.code, miss.at) == (MissCode.GRANULARITY, keys)


@pytest.mark.numeric
@pytest.mark.parametrize("repeat", ["expand", "repeat_interleave"])
def test_heads_of_varying_batches_and_positions(repeat: str) -> None:
    g = Heads(rows="l", positions="s", batch="n")
    keys = quantized_heads(g, "k", GRIDS["head"], REPEATS[repeat])
    values = REPEATS[repeat](g.b, g.v, g.group)
    program = g.done(g.attention(g.q, keys, values))
    before = clone(program)
    settle_rules(program, MOVING_RULES, RewriteContext("optimize"))
    assert apply_rules(program, [FuseRepeatedHeads()]).modified
    for sizes in ({"l": 1, "s": 7, "n": 2}, {"l": 4, "s": 1, "n": 1}):
        inputs = random_inputs(before, **sizes)
        ((want,), (got,)) = (run(each, inputs) for each in (before, program))
        assert torch.equal(got, want)
