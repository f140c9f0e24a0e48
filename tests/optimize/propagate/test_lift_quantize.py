from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.propagate import Graph, applied, only_miss, priced, spec_of, steps

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.spec import Arithmetic, Block
from qfuse.optimize.merge.cse import Combine
from qfuse.optimize.propagate.lift_quantize import LiftQuantize

aten = torch.ops.aten


def quantized(g: Graph, x: Any, *block: int | None, **changes: Any) -> Any:
    """A static quantize of a value."""
    spec = spec_of(*block, **changes)
    return g.quantize(x, spec, g.params(x, spec))


@pytest.mark.numeric
def test_golden_a_chain_is_crossed_at_once() -> None:
    g = Graph(2, 6, 8)
    heads = g.call(aten.view.default, g.x, [2, 6, 2, 4])
    turned = g.call(aten.permute.default, heads, [0, 2, 1, 3])
    program = g.done(quantized(g, turned, None, None, None, None))

    assert applied(program, LiftQuantize).fired == {"lift-quantize": 1}
    assert steps(program) == [
        *("quantize[2, 6, 8]", "reshape[2, 6, 2, 4]", "permute[2, 2, 6, 4]"),
        *("dequantize[2, 2, 6, 4]", "neg[2, 2, 6, 4]"),
    ]
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[2, 6, 8]
const %scale1: float32[1, 1, 1, 1]
const %zero2: int32[1, 1, 1, 1]
const %scale1_1: float32[1, 1, 1]
const %zero2_1: int32[1, 1, 1]
%0 = qfuse.quantize(%x, %scale1_1, %zero2_1, 'int8[-128,127] *x*x* float32 float32:reciprocal:round-zp int'): int8[2, 6, 8]
%1 = aten.reshape(%0, (2, 6, 2, 4)): int8[2, 6, 2, 4]
%2 = aten.permute(%1, (0, 2, 1, 3)): int8[2, 2, 6, 4]
%3 = qfuse.dequantize(%2, %scale1, %zero2, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int'): float32[2, 2, 6, 4]
%4 = aten.neg(%3): float32[2, 2, 6, 4]
return (%4)""",
    )


MOVEMENTS: dict[str, tuple[Any, tuple[Any, ...], Block, str]] = {
    "rows": (aten.view.default, ([12, 8],), (1, None), "1x1x*"),
    "flatten": (aten.view.default, ([2, 48],), (1, None), "1x*x*"),
    "columns": (aten.view.default, ([2, 6, 2, 4],), (None, None, 1, 1), "*x*x1"),
    "groups": (aten.view.default, ([12, 8],), (1, 4), "1x1x4"),
    "permute": (aten.permute.default, ([2, 0, 1],), (1, None, None), "*x*x1"),
    "transpose": (aten.transpose.int, (0, 1), (1, 1, None), "1x1x*"),
    "unsqueeze": (aten.unsqueeze.default, (0,), (None, 1, None, None), "1x*x*"),
    "flip": (aten.flip.default, ([1],), (None, 1, None), "*x1x*"),
    "roll": (aten.roll.default, ([2], [1]), (None, 2, None), "*x2x*"),
    "clone": (aten.clone.default, (), (1, None, 3), "1x*x3"),
    "slice": (aten.slice.Tensor, (1, 1, 4), (None, None, 1), "*x*x1"),
    "select": (aten.select.int, (1, 2), (1, None), "1x*x*"),
    "repeat": (aten.repeat.default, ([1, 2, 1],), (1, None, None), "1x*x*"),
    "each": (aten.repeat_interleave.self_int, (2, 1), (1, 4, None), "1x2x*"),
    "windows": (aten.unfold.default, (2, 3, 1), (1, None, None, None), "1x*x*"),
    "diagonal": (aten.diagonal.default, (1, 0, 2), (1, None), "*x1x*"),
    "mirror": (aten.pad.default, ([1, 2], "reflect"), (None, 1, None), "*x1x*"),
    "mirror 1d": (aten.reflection_pad1d.default, ([1, 2],), (1, None, None), "1x*x*"),
    "edge 1d": (aten.replication_pad1d.default, ([1, 2],), (1, 1, None), "1x1x*"),
    "mirror 2d": (aten.reflection_pad2d.default, ([1, 2, 0, 1],), (1, None, None), "1x*x*"),
    "around": (aten.pad.default, ([1, 2], "circular"), (1, None, None), "1x*x*"),
}


@pytest.mark.numeric
@pytest.mark.parametrize("name", list(MOVEMENTS))
@pytest.mark.parametrize(
    "arithmetic",
    [Arithmetic(), Arithmetic(torch.float64, reciprocal=False), Arithmetic(zero_point_first=True)],
    ids=str,
)
@pytest.mark.parametrize("float_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parameters_move_back(name: str, arithmetic: Arithmetic, float_dtype: torch.dtype) -> None:
    op, args, block, above = MOVEMENTS[name]
    g = Graph(2, 6, 8, dtype=float_dtype)
    moved = g.call(op, g.x, *args)
    program = g.done(quantized(g, moved, *block, arithmetic=arithmetic, float_dtype=float_dtype))

    assert applied(program, LiftQuantize).fired == {"lift-quantize": 1}
    (q,) = [n for n in program.graph.nodes if n.target is ops.quantize]
    assert q.args[0].name == "x"
    assert f" {above} " in q.args[3]


@pytest.mark.numeric
def test_expanded_elements_are_quantized_once() -> None:
    g = Graph(2, 1, 8)
    wide = g.call(aten.expand.default, g.x, [2, 3, 8])
    flat = g.call(aten.reshape.default, wide, [6, 8])
    program = g.done(quantized(g, flat, None, None))

    applied(program, LiftQuantize)
    assert steps(program)[:3] == ["quantize[2, 1, 8]", "expand[2, 3, 8]", "reshape[6, 8]"]


@pytest.mark.numeric
@pytest.mark.parametrize("m", [1, 5])
def test_rows_of_a_dynamic_number(m: int) -> None:
    g = Graph("m", 6, 8)
    rows = g.call(aten.sym_size.int, g.x, 0)
    merged = g.call(aten.view.default, g.x, [-1, 8])
    heads = g.call(aten.view.default, g.x, [rows, 6, 2, 4])
    spec = spec_of(1, None)
    dynamic = g.quantize(merged, spec, g.choose(merged, (1, None)))
    static = quantized(g, heads, None, None, 1, None)
    program = g.done(dynamic, static)

    assert applied(program, LiftQuantize, m=m).fired == {"lift-quantize": 2}


@pytest.mark.numeric
def test_float_readers_keep_the_movement() -> None:
    g = Graph(2, 6, 8)
    flat = g.call(aten.view.default, g.x, [12, 8])
    program = g.done(quantized(g, flat, None, None), flat)

    applied(program, LiftQuantize)
    assert steps(program)[:4] == [
        "view[12, 8]",
        "quantize[2, 6, 8]",
        "reshape[12, 8]",
        "dequantize[12, 8]",
    ]


@pytest.mark.numeric
def test_quantizes_of_several_views_become_one() -> None:
    g = Graph(2, 6, 8)
    spec = spec_of(None, None)
    params = g.params(g.call(aten.view.default, g.x, [12, 8]), spec)
    views = [g.call(aten.view.default, g.x, size) for size in ([12, 8], [6, 16], [4, 24])]
    program = g.done(*(g.quantize(view, spec, params) for view in views))

    applied(program, LiftQuantize)
    Combine().run(program, priced())
    assert [step for step in steps(program) if step.startswith("quantize")] == ["quantize[2, 6, 8]"]


@pytest.mark.numeric
def test_parts_of_a_split_are_quantized_together_if_all_are() -> None:
    g = Graph(4, 12)
    parts = g.call(aten.split.Tensor, g.x, 4, 1)
    spec = spec_of(1, None)
    params = g.params(g.b.item(parts, 0), spec)
    some = [g.quantize(g.b.item(parts, i), spec, params) for i in range(3)]
    program = g.done(*some)

    assert applied(program, LiftQuantize, context=priced()).fired == {"lift-quantize": 3}


def test_refuses_one_part_of_three_whose_lift_does_not_pay() -> None:
    g = Graph(4, 12)
    parts = g.call(aten.split.Tensor, g.x, 4, 1)
    program = g.done(quantized(g, g.b.item(parts, 1), 1, None), g.b.item(parts, 0))

    assert only_miss(program, LiftQuantize, context=priced()).code is MissCode.PROFIT


def test_refuses_a_second_copy_of_a_copy_that_is_read_as_it_is() -> None:
    g = Graph(6, 8)
    copy = g.call(aten.clone.default, g.call(aten.permute.default, g.x, [1, 0]))
    program = g.done(quantized(g, copy, None, None), copy)

    assert only_miss(program, LiftQuantize, context=priced()).code is MissCode.PROFIT


def test_refuses_scales_that_are_interleaved_above() -> None:
    g = Graph(2, 6, 8)
    flat = g.call(aten.view.default, g.x, [12, 8])
    program = g.done(quantized(g, flat, 4, None))

    miss = only_miss(program, LiftQuantize)
    assert (miss.code, miss.at.name) == (MissCode.GRANULARITY, "view_default")
    assert "per-group" in miss.reason
    assert "aten.view" in miss.reason


def test_refuses_copies_with_scales_of_their_own() -> None:
    g = Graph(2, 1, 8)
    wide = g.call(aten.expand.default, g.x, [2, 3, 8])
    program = g.done(quantized(g, wide, None, 1, None))

    assert only_miss(program, LiftQuantize).code is MissCode.GRANULARITY


def test_refuses_stored_numbers_that_leave_the_graph() -> None:
    g = Graph(2, 6, 8)
    flat = g.call(aten.view.default, g.x, [12, 8])
    q = quantized(g, flat, None, None)
    program = g.b.done(g.call(aten.t.default, q))

    assert only_miss(program, LiftQuantize).code is MissCode.SHARED


def test_refuses_strides_that_a_view_depends_on() -> None:
    g = Graph(2, 6, 8)
    part = g.call(aten.slice.Tensor, g.x, 1, 0, 3)
    q = quantized(g, part, None, None, None)
    program = g.done(g.call(aten.view.default, q, [6, 8]))

    assert only_miss(program, LiftQuantize).code is MissCode.SHAPE


@pytest.mark.numeric
@pytest.mark.parametrize("shape", [(4, 12), (2, 12, 5), (2, 12, 3, 4)])
def test_parts_that_are_joined_are_quantized_together(shape: tuple[int, ...]) -> None:
    g = Graph(*shape)
    parts = g.call(aten.split.Tensor, g.x, 6, 1)
    spec = spec_of(*[None] * len(shape))
    params = g.params(g.b.item(parts, 0), spec)
    first, second = (g.quantize(g.b.item(parts, i), spec, params) for i in range(2))
    joined = g.call(aten.cat.default, [second, first], 1)
    program = g.done(g.call(aten.clone.default, joined))

    assert applied(program, LiftQuantize, context=priced()).fired == {"lift-quantize": 2}


def test_refuses_strides_on_which_the_layout_of_a_cat_depends() -> None:
    g = Graph(1, 3, 1, 4)
    image = g.call(aten.permute.default, g.x, [0, 2, 1, 3])
    q = quantized(g, g.call(aten.slice.Tensor, image, 3, 0, 1), None, None, None, None)
    # Of one channel and one column, torch takes one layout for the other.
    program = g.done(g.call(aten.cat.default, [q, q], 1))

    assert only_miss(program, LiftQuantize).code is MissCode.SHAPE


def test_refuses_to_flip_8_bit_floats() -> None:
    g = Graph(8)
    turned = g.call(aten.flip.default, g.x, [0])
    scale = g.constant(torch.tensor([0.1]), "scale")
    spec = "float8_e4m3fn[-448,448] * float32 float32:reciprocal:round-zp none"
    program = g.done(g.call(ops.quantize, turned, scale, None, spec))

    assert only_miss(program, LiftQuantize).code is MissCode.DTYPE


@pytest.mark.numeric
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_indices_of_any_rank(rank: int) -> None:
    g = Graph(3, 8)
    index = g.constant(torch.randint(0, 3, (2, 3)[:rank]), "index")
    x = g.call(aten.index.Tensor, g.x, [index])
    program = g.done(quantized(g, x, *(None,) * rank, 1))

    assert applied(program, LiftQuantize).fired == {"lift-quantize": 1}


@pytest.mark.numeric
def test_gathered_elements() -> None:
    g = Graph(2, 6)
    x = g.call(aten.gather.default, g.x, 1, g.constant(torch.randint(0, 6, (2, 9)), "index"))
    program = g.done(quantized(g, x, 1, None))

    assert applied(program, LiftQuantize).fired == {"lift-quantize": 1}


def test_refuses_windows_with_scales_of_their_own() -> None:
    g = Graph(2, 6)
    x = g.call(aten.unfold.default, g.x, 1, 3, 1)
    miss = only_miss(g.done(quantized(g, x, None, 1, None)), LiftQuantize)

    assert (miss.code, miss.at) == (MissCode.GRANULARITY, x)
    assert "two windows" in miss.reason


def test_refuses_scales_along_the_axis_that_is_gathered() -> None:
    g = Graph(2, 6)
    x = g.call(aten.gather.default, g.x, 1, g.constant(torch.randint(0, 6, (2, 9)), "index"))
    miss = only_miss(g.done(quantized(g, x, None, 1)), LiftQuantize)

    assert (miss.code, miss.at) == (MissCode.GRANULARITY, x)


@pytest.mark.parametrize(
    ("op", "args"),
    [(aten.as_strided.default, ([2, 3], [1, 2])), (aten.roll.default, ([1],))],
    ids=str,
)
def test_refuses_what_is_not_covered_by_name(op: Any, args: tuple[Any, ...]) -> None:
    g = Graph(2, 6)
    x = g.call(op, g.x, *args)
    miss = only_miss(g.done(quantized(g, x, None, None)), LiftQuantize)

    assert (miss.code, miss.at) == (MissCode.ARGUMENT, x)
    assert op.overloadpacket.__name__ in miss.reason


def test_quantizes_on_the_rungs_of_a_long_chain_are_lifted_over_short_distances_only() -> None:
    """Otherwise each of them would repeat the whole chain: quadratic time and memory."""
    g = Graph(8, 8)
    value, rungs = g.x, 100
    outs = []
    for _ in range(rungs):
        value = g.b.call(aten.t.default, value)
        outs.append(g.b.call(aten.neg.default, quantized(g, value, None, None)))
    program = g.b.done(*outs)
    applied(program, LiftQuantize)

    lifted = [n for n in program.graph.nodes if n.target is ops.quantize and n.args[0] is g.x]
    assert len(lifted) == 32
    movements = program.graph.find_nodes(op="call_function", target=aten.t.default)
    movements += program.graph.find_nodes(op="call_function", target=aten.permute.default)
    # 32 chains of up to 32 movements, and the chain itself.
    assert len(movements) <= rungs + 33 * 32 // 2


def test_refuses_a_chain_of_more_movements_than_a_quantize_crosses() -> None:
    g = Graph(8, 8)
    value = g.x
    for _ in range(33):
        value = g.call(aten.t.default, value)
    miss = only_miss(g.done(quantized(g, value, None, None)), LiftQuantize)
    assert miss.code is MissCode.PROFIT
    assert "more than 32 movements" in miss.reason
