from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from tests.support.cases.epilogue import calls
from tests.support.values import bits_same
from torch.fx import Node

from qfuse.cost import CostModel, CostProfile
from qfuse.ir.events import Exactness, Fired, MissCode
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.linear import as_linear
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.quant.spec import Arithmetic, QuantSpec, ZeroPointDomain
from qfuse.ir.stages.verify import verify
from qfuse.optimize.merge.merge_linears import MergeLinears
from qfuse.rewrite.budget import RewriteBudget
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import PassResult, RewriteContext
from qfuse.rewrite.site_check import SiteChecker
from qfuse.testing.build import GraphBuilder
from qfuse.testing.fixed_order import run_fixed_order
from qfuse.testing.quant import per_channel, stored_like
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten


@dataclass
class Weight:
    """A weight to be dequantized, or a float one."""

    n: int
    spec: QuantSpec | None = None
    bias: bool = False
    zero: torch.dtype | None = None
    scale: torch.dtype = torch.float32
    float_dtype: torch.dtype = torch.float32

    def linear(self, b: GraphBuilder, x: Node, k: int, name: str) -> Node:
        """Add the linear."""
        bias = (
            b.const(f"{name}_bias", torch.randn(self.n, dtype=self.float_dtype))
            if self.bias
            else None
        )
        return b.call(aten.linear.default, x, self.node(b, k, name), bias)

    def node(self, b: GraphBuilder, k: int, name: str) -> Node:
        """Add the weight."""
        spec = self.spec
        if spec is None:
            return b.const(name, torch.randn(self.n, k, dtype=self.float_dtype))
        grid = [int(size) for size in spec.grid((self.n, k))]
        scale = b.const(f"{name}_s", (torch.rand(grid) * 0.02 + 1e-3).to(self.scale))
        zero = None
        if self.zero is not None:
            zero = b.const(f"{name}_z", torch.randint(-5, 6, grid).to(self.zero))
        q = b.const(name, stored_like(spec, self.n, k))
        return b.call(ops.dequantize, q, scale, zero, str(spec))


def siblings(*weights: Weight, k: int = 8, lead: tuple[int | str, ...] = ("m",)) -> NormalGraph:
    """Linears of one input, each of which leaves the graph negated."""
    b = GraphBuilder()
    x = b.arg("x", weights[0].float_dtype, *lead, k)
    ys = [weight.linear(b, x, k, f"w{i}") for i, weight in enumerate(weights)]
    return b.done(*(b.call(aten.neg.default, y) for y in ys))


def merge(program: NormalGraph, cost: CostModel | None = None, **sizes: int) -> PassResult:
    """Merge; every element must stay the same expression of the same values."""
    source = clone(program)
    result = MergeLinears().run(program, RewriteContext("optimize", cost))
    verify(program)
    inputs = random_inputs(program, **sizes)
    assert bits_same(run_fixed_order(program, inputs), run_fixed_order(source, inputs))
    return result


INT8 = per_channel()


@pytest.mark.numeric
def test_golden_queries_keys_and_values_are_one_linear() -> None:
    spec = replace(INT8, quant_min=-127)
    program = siblings(Weight(6, spec, bias=True), Weight(2, INT8), Weight(2, INT8, bias=True))
    result = merge(program, m=5)

    assert result.fired == {"merge-linears": 1}
    (event,) = program.log.of(Fired)
    assert (event.exactness, event.note, len(event.places)) == (Exactness.EXACT, "6 + 2 + 2", 3)
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, 8]
const %w0_w1_w2: int8[10, 8]
const %w0_w1_w2_scale: float32[10, 1]
%0 = qfuse.dequantize(%w0_w1_w2, %w0_w1_w2_scale, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[10, 8]
const %w0_bias_w2_bias: float32[10]
%1 = aten.linear(%x, %0, %w0_bias_w2_bias): float32[s0, 10]
%2 = aten.split_with_sizes(%1, (6, 2, 2), 1): (float32[s0, 6], float32[s0, 2], float32[s0, 2])
%3 = getitem(%2, 0): float32[s0, 6]
%4 = getitem(%2, 1): float32[s0, 2]
%5 = getitem(%2, 2): float32[s0, 2]
%6 = aten.neg(%3): float32[s0, 6]
%7 = aten.neg(%4): float32[s0, 2]
%8 = aten.neg(%5): float32[s0, 2]
return (%6, %7, %8)""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize(
    "weights",
    [
        [Weight(3), Weight(5), Weight(1)],
        [Weight(3, bias=True), Weight(5)],
        [Weight(3, float_dtype=torch.bfloat16), Weight(5, float_dtype=torch.bfloat16, bias=True)],
        [Weight(3, INT8), Weight(5, INT8, zero=torch.int8), Weight(2, INT8, zero=torch.int32)],
        [Weight(3, INT8.with_block((None, None))), Weight(5, INT8.with_block((None, None)))],
        [Weight(3, INT8.with_block((None, None))), Weight(5, INT8)],
        [Weight(3, INT8.with_block((1, 4))), Weight(5, INT8.with_block((1, 2)))],
        [Weight(3, INT8.with_block((1, 3))), Weight(5, INT8.with_block((1, None)))],
        [Weight(4, INT8.with_block((2, 4))), Weight(3, INT8.with_block((2, 4)))],
        [Weight(3, INT8.with_block((2, 4))), Weight(4, INT8.with_block((2, 4)))],
        [Weight(3, INT8), Weight(5, INT8, scale=torch.bfloat16)],
        [Weight(3, INT8), Weight(5, INT8, scale=torch.float64)],
        [Weight(3, INT8, zero=torch.float32), Weight(5, INT8, zero=torch.int32)],
        [Weight(0, INT8), Weight(5, INT8)],
    ],
    ids=str,
)
def test_one_linear_whatever_the_scales_are(weights: list[Weight]) -> None:
    program = siblings(*weights)
    assert merge(program, m=4).fired == {"merge-linears": 1}
    assert calls(program).count("aten.linear") == 1


@pytest.mark.numeric
@pytest.mark.parametrize("lead", [(), (3,), (1, "s"), ("b", 1, 4), (0,)], ids=str)
def test_any_rank_and_size(lead: tuple[int | str, ...]) -> None:
    program = siblings(Weight(3, INT8), Weight(5, INT8, bias=True), lead=lead)
    assert merge(program, b=2, s=3).fired == {"merge-linears": 1}


@pytest.mark.numeric
def test_equal_per_tensor_scales_stay_one_scale() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 4, 8)
    spec = INT8.with_block((None, None))
    ys = []
    for i in range(2):
        scale = b.const(f"s{i}", torch.tensor([[0.0123]]))
        q = b.const(f"w{i}", stored_like(spec, 3, 8))
        ys.append(b.call(aten.linear.default, x, b.call(ops.dequantize, q, scale, None, str(spec))))
    program = b.done(*(b.call(aten.neg.default, y) for y in ys))
    merge(program)

    (node,) = program.graph.find_nodes(op="call_function", target=aten.linear.default)
    linear = as_linear(node)
    assert linear is not None
    weight = as_dequantize(linear.weight)
    assert weight is not None
    assert weight.params.spec.block == (None, None)


@pytest.mark.numeric
def test_views_of_a_part_still_work() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "b", "s", 8)
    q = Weight(12, INT8).linear(b, x, 8, "q")
    k = Weight(6, INT8).linear(b, x, 8, "k")
    batch, length = (b.call(aten.sym_size.int, q, axis) for axis in (0, 1))
    heads = b.call(aten.view.default, q, [batch, length, 4, 3])
    heads = b.call(aten.permute.default, heads, [0, 2, 1, 3])
    flat = b.call(aten.view.default, k, [batch, -1])
    flat = b.call(aten.unsqueeze.default, flat, 0)
    program = b.done(heads, b.call(aten.relu.default, flat), q)

    assert merge(program, b=2, s=3).fired == {"merge-linears": 1}
    assert "aten.view" not in calls(program)


@pytest.mark.numeric
def test_values_are_within_rounding_of_the_library() -> None:
    program = siblings(Weight(33, INT8), Weight(65, INT8, bias=True), k=200, lead=(7,))
    source = clone(program)
    inputs = random_inputs(program)
    checker = SiteChecker(program, inputs)
    result = MergeLinears().run(program, RewriteContext("optimize", checker=checker))

    assert result.fired == {"merge-linears": 1}
    torch.testing.assert_close(run(program, inputs), run(source, inputs))


@pytest.mark.numeric
def test_what_leaves_keeps_its_strides_whatever_the_sizes_are() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "b", "s", 8)
    q, k, v = (Weight(n, INT8).linear(b, x, 8, f"w{n}") for n in (6, 4, 2))
    turned = b.call(aten.transpose.int, k, 0, 1)
    program = b.done(q, turned, b.call(aten.neg.default, v))
    inputs = random_inputs(program, b=2, s=3)
    before = [value.stride() for value in run(program, inputs)]

    assert merge(program, b=2, s=3).fired == {"merge-linears": 1}
    assert [value.stride() for value in run(program, inputs)] == before


def refused(program: NormalGraph, result: PassResult) -> list[tuple[MissCode, str]]:
    """The reasons that were given; one linear per sibling must be left."""
    del program
    return [(miss.code, miss.at.name) for _, miss in result.misses]


def test_refuses_what_is_given_at_run_time_but_merges_the_rest() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 4, 8)
    w = b.arg("given", torch.float32, 3, 8)
    ys = [Weight(3).linear(b, x, 8, f"w{i}") for i in range(2)]
    program = b.done(b.call(aten.linear.default, x, w), *(b.call(aten.neg.default, y) for y in ys))
    result = merge(program)

    assert refused(program, result) == [(MissCode.NOT_CONSTANT, "given")]
    assert result.fired == {"merge-linears": 1}
    assert calls(program).count("aten.linear") == 2


@pytest.mark.parametrize(
    "other",
    [
        Weight(3, replace(INT8, dtype=torch.uint8, quant_min=0, quant_max=255)),
        Weight(3, replace(INT8, arithmetic=Arithmetic(torch.float64))),
        Weight(3, replace(INT8, domain=ZeroPointDomain.FLOAT_OFFSET)),
        Weight(3),
    ],
    ids=["storage", "arithmetic", "domain", "float"],
)
def test_refuses_siblings_of_other_kinds(other: Weight) -> None:
    program = siblings(Weight(3, INT8), other)
    before = to_text(program.graph)
    result = merge(program, m=4)

    assert {code for code, _ in refused(program, result)} == {MissCode.DTYPE}
    assert to_text(program.graph) == before


OFFSETS = replace(INT8, quant_min=0, quant_max=15, domain=ZeroPointDomain.FLOAT_OFFSET)


@pytest.mark.parametrize(
    "other",
    [
        Weight(3, replace(OFFSETS, quant_max=7), zero=torch.float32),
        Weight(3, OFFSETS),
    ],
    ids=["range", "no offsets"],
)
def test_refuses_float_offsets_that_count_from_another_middle(other: Weight) -> None:
    program = siblings(Weight(3, OFFSETS, zero=torch.float32), other)
    result = merge(program, m=4)

    assert {code for code, _ in refused(program, result)} == {MissCode.DTYPE}


def test_refuses_a_weight_that_is_held_anyway() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 4, 8)
    tied = b.const("tied", torch.randn(3, 8))
    y = b.call(aten.linear.default, x, tied)
    z = Weight(3).linear(b, x, 8, "w")
    program = b.done(y, z, b.call(aten.neg.default, tied))
    result = merge(program)

    assert refused(program, result) == [(MissCode.SHARED, "tied")]
    assert not result.fired


@pytest.mark.parametrize("stored", [False, True])
def test_what_nothing_reads_holds_no_weight(stored: bool) -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 4, 8)
    ys = [Weight(3, INT8 if stored else None).linear(b, x, 8, f"w{i}") for i in range(2)]
    linear = as_linear(ys[0])
    assert linear is not None
    b.call(aten.abs.default, b.call(aten.neg.default, linear.weight))
    b.call(aten.as_strided.default, ys[1], [3], [1])
    program = b.done(*(b.call(aten.neg.default, y) for y in ys))

    assert merge(program).fired == {"merge-linears": 1}
    assert calls(program).count("aten.linear") == 1


def test_refuses_one_weight_with_two_biases() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 4, 8)
    w = b.const("w", torch.randn(3, 8))
    ys = [b.call(aten.linear.default, x, w, b.const(f"b{i}", torch.randn(3))) for i in range(2)]
    result = merge(b.done(*ys))

    assert {miss.code for _, miss in result.misses} == {MissCode.SHARED}
    assert not result.fired


def test_refuses_a_bias_computed_at_run_time() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 4, 8)
    bias = b.arg("bias", torch.float32, 3)
    w = b.const("w", torch.randn(3, 8))
    y = b.call(aten.linear.default, x, w, bias)
    result = merge(b.done(y, Weight(3).linear(b, x, 8, "v")))

    assert [(miss.code, miss.at.name) for _, miss in result.misses] == [
        (MissCode.NOT_CONSTANT, "bias")
    ]


def test_refuses_what_does_not_pay() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 4096, 8)
    program = b.done(*(Weight(64).linear(b, x, 8, f"w{i}") for i in range(2)))
    result = merge(program, CostModel(CostProfile.pinned()))

    (miss,) = (miss for _, miss in result.misses)
    assert miss.code is MissCode.PROFIT
    assert not result.fired


@pytest.mark.numeric
def test_siblings_whose_input_is_merged_too() -> None:
    """The input of the second pair is replaced, by a part of the first, before it is merged."""
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "m", 8)
    first, other = (Weight(8, INT8).linear(b, x, 8, f"w{i}") for i in range(2))
    pair = (Weight(4, INT8, bias=True).linear(b, first, 8, f"v{i}") for i in range(2))
    program = b.done(*(b.call(aten.neg.default, y) for y in (*pair, other)))

    assert merge(program, m=3).fired == {"merge-linears": 2}
    linears = [n for n in program.graph.nodes if n.target is aten.linear.default]
    assert len(linears) == 2
    assert all(node in set(program.graph.nodes) for n in linears for node in n.all_input_nodes)


def test_the_gate_is_asked() -> None:
    program = siblings(Weight(3), Weight(5))
    banned = RewriteBudget(banned=frozenset({"optimize/merge-linears@linear_default"}))
    assert not MergeLinears().run(program, RewriteContext("optimize", budget=banned)).fired


def test_again_there_is_nothing_to_do() -> None:
    program = siblings(Weight(3, INT8), Weight(5, INT8))
    merge(program, m=4)
    assert not merge(program, m=4).fired


WEIGHTS = st.builds(
    Weight,
    st.integers(1, 5),
    st.none()
    | st.builds(
        lambda rows, columns, low: replace(INT8, block=(rows, columns), quant_min=low),
        st.sampled_from((None, 1, 2)),
        st.sampled_from((None, 1, 2, 3, 4, 6)),
        st.sampled_from((-128, -127, -8)),
    ),
    st.booleans(),
    st.sampled_from((None, torch.int8, torch.int32, torch.float32)),
    st.sampled_from((torch.float32, torch.bfloat16, torch.float64)),
)


@pytest.mark.property
@given(st.lists(WEIGHTS, min_size=2, max_size=5), st.integers(1, 7), st.integers(1, 3))
def test_any_siblings_keep_their_bits(weights: list[Weight], k: int, rows: int) -> None:
    program = siblings(*weights, k=k, lead=(rows,))
    result = merge(program)
    kinds = math.prod((any(w.spec for w in weights), any(not w.spec for w in weights))) + 1
    assert calls(program).count("aten.linear") == kinds
    assert result.fired.total() <= kinds
