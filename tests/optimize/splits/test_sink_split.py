from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.propagate import Graph, only_miss, priced, spec_of, steps
from tests.support.cases.splits import matmuls, parts, sunk
from tests.support.values import bits_same
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.optimize.fuse.epilogue_activation import FuseActivation
from qfuse.optimize.fuse.linear import FuseLinear
from qfuse.optimize.merge.merge_linears import MergeLinears
from qfuse.optimize.splits.sink_split import SinkSplit
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rule import Rule
from qfuse.rewrite.site_check import SiteChecker
from qfuse.testing.fixed_order import run_fixed_order
from qfuse.testing.quant import QuantizedLinear, per_tensor
from qfuse.testing.run import random_inputs

aten = torch.ops.aten
LAST = 9223372036854775807


def heads(g: Graph, x: Node, count: int, width: int) -> Node:
    """Features as heads, in front of the positions."""
    shape = x.meta["val"].shape
    lead = [s if isinstance(s, int) else g.call(aten.sym_size.int, g.x, 0) for s in shape[:-1]]
    return g.call(
        aten.permute.default, g.call(aten.view.default, x, [*lead, count, width]), [0, 2, 1, 3]
    )


def rotary(g: Graph, x: Node, cos: Node, sin: Node) -> Node:
    """Rotate pairs of features, half a head apart."""
    half = int(x.meta["val"].shape[-1]) // 2
    low = g.call(aten.slice.Tensor, x, 3, 0, half)
    high = g.call(aten.slice.Tensor, x, 3, half, LAST)
    turned = g.call(aten.cat.default, [g.call(aten.neg.default, high), low], -1)
    straight = g.call(aten.mul.Tensor, x, cos)
    return g.call(aten.add.Tensor, straight, g.call(aten.mul.Tensor, turned, sin))


def attention(g: Graph, q: Node, k: Node, v: Node) -> Node:
    """Attention, which reads its operands from memory."""
    return g.call(aten.scaled_dot_product_attention.default, q, k, v)


@pytest.mark.numeric
def test_golden_an_activation_of_all_parts_is_one() -> None:
    g = Graph("m", 12)
    a, b = (g.call(aten.silu.default, part) for part in parts(g, 8, 4))
    program = g.done(a, g.call(aten.add.Tensor, b, 1))

    assert sunk(program, m=3).fired == {"sink-split": 1}
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, 12]
%0 = aten.silu(%x): float32[s0, 12]
%1 = aten.split_with_sizes(%0, (8, 4), 1): (float32[s0, 8], float32[s0, 4])
%2 = getitem(%1, 0): float32[s0, 8]
%3 = getitem(%1, 1): float32[s0, 4]
%4 = aten.add.Tensor(%3, 1): float32[s0, 4]
%5 = aten.neg(%2): float32[s0, 8]
%6 = aten.neg(%4): float32[s0, 4]
return (%5, %6)""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("rows", ["m", 1, 2])
@pytest.mark.parametrize("width", [2, 8])
def test_rotary_of_queries_and_keys_runs_once(rows: int | str, width: int) -> None:
    g = Graph(rows, 6, 16 * width)
    q, k, v = parts(g, 8 * width, 4 * width, 4 * width)
    q, k, v = heads(g, q, 8, width), heads(g, k, 4, width), heads(g, v, 4, width)
    cos, sin = (g.constant(torch.randn(1, 1, 6, width), name) for name in ("cos", "sin"))
    program = g.done(rotary(g, q, cos, sin), rotary(g, k, cos, sin), v)
    result = sunk(program, m=3)

    assert result.fired == {"sink-split": 1}
    made = [step.partition("[")[0] for step in steps(program)]
    counts = [made.count(name) for name in ("cat", "mul", "add", "reshape", "view", "permute")]
    assert counts == [1, 2, 1, 1, 1, 2]


@pytest.mark.numeric
def test_rotary_pays_where_attention_reads_queries_and_keys() -> None:
    g = Graph(1, 6, 24 * 8)
    q, k, v = (heads(g, part, 8, 8) for part in parts(g, 64, 64, 64))
    cos, sin = (g.constant(torch.randn(1, 1, 6, 8), name) for name in ("cos", "sin"))
    program = g.done(attention(g, rotary(g, q, cos, sin), rotary(g, k, cos, sin), v))

    source = clone(program)
    assert apply_rules(program, [SinkSplit()], priced()).fired == {"sink-split": 1}
    inputs = random_inputs(program)
    assert bits_same(run_fixed_order(program, inputs), run_fixed_order(source, inputs))


def test_repeated_keys_are_computed_as_they_are_read() -> None:
    g = Graph(1, 6, 16 * 8)
    q, k, v = parts(g, 64, 32, 32)
    cos, sin = (g.constant(torch.randn(1, 1, 6, 8), name) for name in ("cos", "sin"))
    q = rotary(g, heads(g, q, 8, 8), cos, sin)
    k = rotary(g, heads(g, k, 4, 8), cos, sin)
    many = []
    for x in (k, heads(g, v, 4, 8)):
        grown = g.call(aten.expand.default, g.call(aten.unsqueeze.default, x, 2), [1, 4, 2, 6, 8])
        copied = g.call(aten.clone.default, grown, memory_format=torch.contiguous_format)
        many.append(g.call(aten._unsafe_view.default, copied, [1, 8, 6, 8]))
    program = g.done(attention(g, q, *many))

    assert only_miss(program, SinkSplit, priced()).code is MissCode.PROFIT


def test_never_pays_where_every_part_is_computed_as_it_is_read() -> None:
    g = Graph("m", 12)
    a, b = (g.call(aten.silu.default, part) for part in parts(g, 8, 4))
    program = g.done(g.call(aten.add.Tensor, a, 1), g.call(aten.add.Tensor, b, 2))

    miss = only_miss(program, SinkSplit, priced(), m=2)
    assert (miss.code, miss.reason) == (MissCode.PROFIT, "it never pays")


@pytest.mark.numeric
def test_an_activation_goes_on_into_the_epilogue_of_a_merged_linear() -> None:
    g = Graph("m", 8)
    block = QuantizedLinear(g.b, 4, 8)
    x = block.quantized(g.x, per_tensor(2))
    ys = [g.call(aten.relu.default, block.linear(x, name)) for name in ("a", "b")]
    program = g.done(*matmuls(g, *ys))
    source = clone(program)
    context = priced()

    MergeLinears().run(program, RewriteContext("optimize"))
    assert apply_rules(program, [SinkSplit()], context).fired == {"sink-split": 1}
    rules: list[Rule[Any]] = [FuseLinear(), FuseActivation()]
    assert apply_rules(program, rules, context).fired["fuse-activation"] == 1
    inputs = random_inputs(program, m=5)
    assert bits_same(run_fixed_order(program, inputs), run_fixed_order(source, inputs))


CASES: dict[str, Any] = {
    "cast": lambda g, x: g.call(aten._to_copy.default, x, dtype=torch.bfloat16),
    "gelu": lambda g, x: g.call(aten.gelu.default, x, approximate="tanh"),
    "clamp": lambda g, x: g.call(aten.clamp.default, x, -0.5, 0.5),
    "scaled": lambda g, x: g.call(aten.mul.Tensor, x, 0.3),
    "twice": lambda g, x: g.call(aten.mul.Tensor, x, x),
    "alpha": lambda g, x: g.call(aten.sub.Tensor, x, g.call(aten.abs.default, x), alpha=2),
    "clone": lambda g, x: g.call(aten.clone.default, x),
    "unsqueezed": lambda g, x: g.call(aten.neg.default, g.call(aten.unsqueeze.default, x, 1)),
    "expanded": lambda g, x: g.call(
        aten.neg.default,
        g.call(aten.expand.default, g.call(aten.unsqueeze.default, x, 0), [2, -1, -1, -1]),
    ),
    "turned": lambda g, x: g.call(aten.neg.default, g.call(aten.transpose.int, x, 0, -1)),
    "selected": lambda g, x: g.call(aten.neg.default, g.call(aten.select.int, x, 1, -1)),
    "first rows": lambda g, x: g.call(aten.neg.default, g.call(aten.slice.Tensor, x, 1, 0, 2)),
}


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_done_alike_is_done_once(case: str, axis: int, dtype: torch.dtype) -> None:
    if axis == 1 and case in {"selected", "first rows"}:
        pytest.skip("it is done to the axis of the parts")
    shape = [3, 4, 5]
    shape[axis] = 7
    g = Graph(*shape, dtype=dtype)
    program = g.done(*(CASES[case](g, part) for part in parts(g, 2, 1, 4, axis=axis)))
    before = sum(step.startswith(("mul", "neg")) for step in steps(program))

    assert sunk(program).fired == {"sink-split": 1}
    assert sum(step.startswith(("mul", "neg")) for step in steps(program)) <= before
    assert not sunk(program).modified


@pytest.mark.numeric
def test_a_check_by_values_lets_a_library_compute_functions_its_way() -> None:
    g = Graph(64, 24)
    program = g.done(*(g.call(aten.gelu.default, part) for part in parts(g, 9, 11, 4)))
    checker = SiteChecker(program, random_inputs(program))

    assert sunk(program, context=RewriteContext("optimize", checker=checker)).fired == {
        "sink-split": 1
    }


@pytest.mark.numeric
def test_a_part_without_elements_goes_along() -> None:
    g = Graph("m", 6)
    program = g.done(*(g.call(aten.relu.default, part) for part in parts(g, 2, 0, 4)))

    assert sunk(program, m=3).fired == {"sink-split": 1}


@pytest.mark.numeric
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_any_number_of_rows(rows: int) -> None:
    g = Graph("m", 12)
    program = g.done(*(g.call(aten.sigmoid.default, part) for part in parts(g, 4, 4, 4)))

    assert sunk(program, m=rows).fired == {"sink-split": 1}


@pytest.mark.numeric
def test_parts_that_others_read_stay() -> None:
    g = Graph("m", 12)
    a, b = parts(g, 8, 4)
    relus = [g.call(aten.relu.default, part) for part in (a, b)]
    program = g.done(*relus, a)

    assert sunk(program, m=3).fired == {"sink-split": 1}
    assert len([s for s in steps(program) if s.startswith("relu")]) == 1


@pytest.mark.numeric
def test_one_scale_quantizes_all_parts() -> None:
    g = Graph(3, 12)
    spec = spec_of(None, None)
    params = g.params(g.x, spec)
    program = g.done(*(g.quantize(part, spec, params) for part in parts(g, 8, 4)))

    assert sunk(program).fired == {"sink-split": 1}
    assert len([s for s in steps(program) if s.startswith("quantize")]) == 1


@pytest.mark.numeric
def test_a_scale_per_row_quantizes_all_parts_but_not_along_them() -> None:
    for axis, fires in ((1, True), (0, False)):
        g = Graph(4, 4)
        spec = spec_of(1, None)
        params = g.params(parts(g, 2, 2, axis=axis)[0], spec)
        program = g.done(*(g.quantize(p, spec, params) for p in parts(g, 2, 2, axis=axis)))

        assert sunk(program).modified is fires


@pytest.mark.numeric
def test_views_of_a_result_are_made_again() -> None:
    g = Graph(2, 12)
    relus = [g.call(aten.relu.default, part) for part in parts(g, 8, 4)]
    program = g.done(g.call(aten.view.default, relus[0], [16]), relus[1])

    assert sunk(program).fired == {"sink-split": 1}


@pytest.mark.numeric
def test_neighbours_only() -> None:
    g = Graph("m", 12)
    a, b, c = parts(g, 4, 4, 4)
    program = g.done(g.call(aten.silu.default, a), b, g.call(aten.silu.default, c))

    assert not sunk(program, m=2).modified


@pytest.mark.numeric
def test_many_parts_are_taken_at_once_or_not_at_all() -> None:
    g = Graph("m", 12)
    program = g.done(*(g.call(aten.relu.default, part) for part in parts(g, *[1] * 12)))

    assert sunk(program, m=2).fired == {"sink-split": 1}


def test_the_product_of_the_parts_is_not_done_alike() -> None:
    g = Graph("m", 12)
    a, b = parts(g, 6, 6)
    program = g.done(g.call(aten.mul.Tensor, g.call(aten.silu.default, a), b))

    assert not sunk(program, m=2).modified


def test_other_arguments_are_not_alike() -> None:
    g = Graph("m", 12)
    a, b = parts(g, 8, 4)
    program = g.done(g.call(aten.mul.Tensor, a, 1), g.call(aten.mul.Tensor, b, 1.0))

    assert not sunk(program, m=2).modified


def test_refuses_an_operand_that_varies_along_the_parts() -> None:
    g = Graph("m", 8)
    row = g.constant(torch.randn(4), "row")
    a, b = parts(g, 4, 4)
    first = g.call(aten.mul.Tensor, a, row)
    program = g.done(first, g.call(aten.mul.Tensor, b, row))

    miss = only_miss(program, SinkSplit, m=2)
    assert (miss.code, miss.at) == (MissCode.AXIS, first)


def test_refuses_a_view_in_which_the_parts_are_no_rows() -> None:
    g = Graph(2, 12)
    views = [g.call(aten.reshape.default, part, [6, 2]) for part in parts(g, 6, 6)]
    program = g.done(*(g.call(aten.relu.default, view) for view in views))

    miss = only_miss(program, SinkSplit)
    assert (miss.code, miss.at) == (MissCode.AXIS, views[0])


def test_refuses_a_slice_along_the_parts() -> None:
    g = Graph("m", 12)
    cut = [g.call(aten.slice.Tensor, part, 1, 0, 2) for part in parts(g, 6, 6)]
    program = g.done(*(g.call(aten.relu.default, part) for part in cut))

    miss = only_miss(program, SinkSplit, m=2)
    assert (miss.code, miss.at) == (MissCode.AXIS, cut[0])


def test_refuses_what_leaves_the_graph() -> None:
    g = Graph("m", 12)
    relus = [g.call(aten.relu.default, part) for part in parts(g, 8, 4)]
    program = g.b.done(*relus)

    miss = only_miss(program, SinkSplit, m=2)
    assert (miss.code, miss.at) == (MissCode.SHARED, relus[0])


def test_refuses_a_view_that_leaves_the_graph() -> None:
    g = Graph(2, 12)
    relus = [g.call(aten.relu.default, part) for part in parts(g, 8, 4)]
    program = g.b.done(g.call(aten.view.default, relus[0], [16]), *matmuls(g, relus[1]))

    miss = only_miss(program, SinkSplit)
    assert (miss.code, miss.at) == (MissCode.SHARED, relus[0])


def test_refuses_readers_of_strides() -> None:
    g = Graph(2, 12)
    relus = [g.call(aten.relu.default, part) for part in parts(g, 8, 4)]
    memory = g.call(aten.as_strided.default, relus[0], [3], [2])
    program = g.done(memory, relus[1])

    miss = only_miss(program, SinkSplit)
    assert (miss.code, miss.at) == (MissCode.ORDER, memory)


def test_refuses_parts_of_unknown_size() -> None:
    g = Graph(3, "m")
    split = g.call(aten.split.Tensor, g.x, 2, 1)
    items = [g.b.item(split, index) for index in range(2)]
    program = g.done(*(g.call(aten.relu.default, part) for part in items))

    assert only_miss(program, SinkSplit, m=3).code is MissCode.SHAPE


def test_refuses_an_operand_that_comes_after_a_part() -> None:
    g = Graph("m", 2, 12)
    a, b = parts(g, 8, 4)
    second = g.call(aten.view.default, b, [g.call(aten.sym_size.int, b, 0), 2, 2, 2])
    late = g.call(aten.sym_size.int, a, 0)
    first = g.call(aten.view.default, a, [late, 2, 4, 2])
    relus = [g.call(aten.relu.default, view) for view in (first, second)]

    miss = only_miss(g.done(*relus), SinkSplit, m=3)
    assert (miss.code, miss.at) == (MissCode.ORDER, late)
