from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from tests.support.cases.convolution import Conv, merge, siblings
from tests.support.cases.epilogue import calls
from torch import nn
from torch.fx import Node
from torch.fx.node import Argument

import qfuse
from qfuse.cost import CostModel, CostProfile
from qfuse.ir.events import Exactness, Fired, MissCode
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops.convolution import as_convolution
from qfuse.ir.quant.spec import QuantSpec, ZeroPointDomain
from qfuse.optimize.merge.merge_convolutions import MergeConvolutions
from qfuse.rewrite.budget import RewriteBudget
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import PassResult, RewriteContext
from qfuse.rewrite.site_check import SiteChecker
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_channel, per_tensor
from qfuse.testing.run import random_inputs, run
from qfuse.zoo import recipes

aten = torch.ops.aten

INT8 = per_channel(4)
WHOLE = per_tensor(4)


def grouped(*block: int | None) -> QuantSpec:
    return INT8.with_block(block)


@pytest.mark.numeric
def test_golden_branches_of_one_input_are_one_convolution() -> None:
    settings: tuple[Argument, ...] = ([2, 1], [1, 0])
    program = siblings(
        Conv(3, INT8, bias=True, settings=settings), Conv(2, WHOLE, settings=settings)
    )
    result = merge(program, b=2)

    assert result.fired == {"merge-convolutions": 1}
    (event,) = program.log.of(Fired)
    assert (event.exactness, event.note, len(event.places)) == (Exactness.EXACT, "3 + 2", 2)
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, 4, 7, 6]
const %w0_w1: int8[5, 4, 3, 2]
const %w0_w1_scale: float32[5, 1, 1, 1]
%0 = qfuse.dequantize(%w0_w1, %w0_w1_scale, None, 'int8[-128,127] 1x*x*x* float32 float32:reciprocal:round-zp int'): float32[5, 4, 3, 2]
const %w0_bias_1: float32[5]
%1 = aten.conv2d(%x, %0, %w0_bias_1, (2, 1), (1, 0), (1, 1), 1): float32[s0, 5, 4, 5]
%2 = aten.split_with_sizes(%1, (3, 2), 1): (float32[s0, 3, 4, 5], float32[s0, 2, 4, 5])
%3 = getitem(%2, 0): float32[s0, 3, 4, 5]
%4 = getitem(%2, 1): float32[s0, 2, 4, 5]
%5 = aten.neg(%3): float32[s0, 3, 4, 5]
%6 = aten.neg(%4): float32[s0, 2, 4, 5]
return (%5, %6)""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize(
    "convs",
    [
        [Conv(3), Conv(5), Conv(1)],
        [Conv(3, bias=True), Conv(5)],
        [Conv(3, float_dtype=torch.bfloat16), Conv(5, float_dtype=torch.bfloat16, bias=True)],
        [Conv(3, INT8), Conv(5, INT8, zero=torch.int8), Conv(2, INT8, zero=torch.int32)],
        [Conv(3, WHOLE), Conv(5, WHOLE)],
        [Conv(3, WHOLE), Conv(5, INT8, bias=True)],
        [Conv(3, replace(INT8, quant_min=-127)), Conv(5, INT8)],
        [Conv(3, grouped(1, 2, None, None)), Conv(5, grouped(1, 2, None, None))],
        [Conv(3, grouped(1, 3, 1, None)), Conv(5, grouped(None, 3, 1, None))],
        [Conv(4, grouped(2, None, None, None)), Conv(3, grouped(2, None, None, None))],
        [Conv(3, grouped(2, None, None, None)), Conv(4, grouped(2, None, None, None))],
        [Conv(3, INT8), Conv(5, INT8, scale=torch.float64)],
        [Conv(3, kernel=(1, 1)), Conv(5, kernel=(1, 1))],
    ],
)
def test_one_convolution_whatever_the_scales_are(convs: list[Conv]) -> None:
    program = siblings(*convs)
    assert merge(program, b=2).fired == {"merge-convolutions": 1}
    assert calls(program).count("aten.conv2d") == 1


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("lead", [(), (0,), (1,), ("b",)], ids=str)
@pytest.mark.parametrize("settings", [(), ([2], [1], [2])], ids=str)
def test_any_rank_with_and_without_a_batch(
    rank: int, lead: tuple[int | str, ...], settings: tuple[Argument, ...]
) -> None:
    kernel = (2, 3, 2)[:rank]
    spec = per_channel(rank + 2)
    convs = [Conv(n, spec, bias=n == 3, kernel=kernel, settings=settings) for n in (3, 2)]
    program = siblings(*convs, lead=lead)

    assert merge(program, b=3).fired == {"merge-convolutions": 1}


@pytest.mark.numeric
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_a_padding_in_words(rank: int, padding: str) -> None:
    kernel = (2, 3, 2)[:rank]
    program = siblings(*(Conv(n, kernel=kernel, padding=padding) for n in (3, 2)))

    assert merge(program, b=2).fired == {"merge-convolutions": 1}
    assert calls(program).count(f"aten.conv{rank}d.padding") == 1


@pytest.mark.numeric
def test_one_number_stands_for_every_axis() -> None:
    convs = [Conv(3, settings=([2, 2], [1, 1])), Conv(2, settings=([2], [1], [1], 1))]
    assert merge(siblings(*convs), b=2).fired == {"merge-convolutions": 1}


def convolution(b: GraphBuilder, x: Node, name: str, transposed: bool, groups: int = 1) -> Node:
    weight = b.const(name, torch.randn(4, 4 // groups, 3, 3))
    zeros, ones = [0, 0], [1, 1]
    rest = (ones, zeros, ones, transposed, zeros, groups)
    return b.call(aten.convolution.default, x, weight, None, *rest)


@pytest.mark.numeric
def test_the_general_op_merges_too() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, 4, 5, 5)
    ys = [convolution(b, x, f"w{i}", transposed=False) for i in range(2)]
    program = b.done(*(b.call(aten.neg.default, y) for y in ys))

    assert merge(program).fired == {"merge-convolutions": 1}
    assert calls(program).count("aten.convolution") == 1


@pytest.mark.numeric
def test_parts_are_read_by_views_by_others_and_by_the_caller() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "b", 4, 5, 5)
    left, right = (Conv(n, INT8, kernel=(1, 1)).node(b, x, 4, f"w{n}") for n in (6, 2))
    flat = b.call(aten.view.default, left, [b.call(aten.sym_size.int, left, 0), 150])
    next_ = Conv(3).node(b, right, 2, "next")
    program = b.done(flat, next_, right, b.call(aten.permute.default, left, [0, 2, 3, 1]))

    assert merge(program, b=2).fired == {"merge-convolutions": 1}


@pytest.mark.numeric
@pytest.mark.parametrize("last", [False, True])
def test_what_leaves_keeps_its_strides_whatever_the_sizes_are(last: bool) -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "b", 4, 5, 5)
    if last:
        x = b.call(aten.clone.default, x, memory_format=torch.channels_last)
    left, right = (Conv(n, INT8, kernel=(1, 1)).node(b, x, 4, f"w{n}") for n in (6, 2))
    program = b.done(left, b.call(aten.transpose.int, right, 1, 2))
    inputs = random_inputs(program, b=2)
    before = [value.stride() for value in run(program, inputs)]
    result = MergeConvolutions().run(program, RewriteContext("optimize"))

    assert result.fired == {"merge-convolutions": 1}
    assert [value.stride() for value in run(program, inputs)] == before


@pytest.mark.numeric
def test_values_are_within_rounding_of_the_library() -> None:
    program = siblings(Conv(33, INT8), Conv(17, INT8, bias=True), c=16, lead=(2,))
    source = clone(program)
    inputs = random_inputs(program)
    checker = SiteChecker(program, inputs)
    result = MergeConvolutions().run(program, RewriteContext("optimize", checker=checker))

    assert result.fired == {"merge-convolutions": 1}
    torch.testing.assert_close(run(program, inputs), run(source, inputs))


def refused(result: PassResult) -> set[tuple[MissCode, str]]:
    return {(miss.code, miss.at.name) for _, miss in result.misses}


@pytest.mark.parametrize(
    ("other", "code"),
    [
        (Conv(3, kernel=(3, 3)), MissCode.SHAPE),
        (Conv(3, settings=([2, 1],)), MissCode.SHAPE),
        (Conv(3, settings=([1, 1], [1, 0])), MissCode.SHAPE),
        (Conv(3, settings=([1, 1], [0, 0], [2, 1])), MissCode.SHAPE),
        (Conv(3, padding="same"), MissCode.SHAPE),  # The kernel is even along one axis.
        (Conv(3, INT8), MissCode.SHAPE),
    ],
)
def test_refuses_siblings_of_another_geometry(other: Conv, code: MissCode) -> None:
    program = siblings(Conv(3), other)
    before = to_text(program.graph)
    result = merge(program, b=2)

    assert {miss.code for _, miss in result.misses} == {code}
    assert to_text(program.graph) == before


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("named", "numbers"),
    [
        (Conv(3, padding="valid"), Conv(2, settings=([1, 1], [0, 0]))),
        (Conv(3, kernel=(3, 5), padding="same"), Conv(2, kernel=(3, 5), settings=([1], [1, 2]))),
        (Conv(3, kernel=(3, 1), padding="same"), Conv(2, kernel=(3, 1), settings=([1], [1, 0]))),
    ],
    ids=["valid", "same", "same-along-one"],
)
@pytest.mark.parametrize("turned", [False, True])
def test_a_padding_by_name_is_one_in_numbers(named: Conv, numbers: Conv, turned: bool) -> None:
    pair = (numbers, named) if turned else (named, numbers)

    assert merge(siblings(*pair), b=2).fired == {"merge-convolutions": 1}


@pytest.mark.parametrize(
    "other",
    [
        Conv(3, replace(INT8, dtype=torch.uint8, quant_min=0, quant_max=255)),
        Conv(3, replace(INT8, domain=ZeroPointDomain.FLOAT_OFFSET)),
        Conv(3, grouped(1, 2, None, None)),
    ],
    ids=["storage", "domain", "blocks"],
)
def test_refuses_siblings_of_other_kinds_but_merges_the_rest(other: Conv) -> None:
    program = siblings(Conv(3, INT8), other, Conv(2, INT8))
    result = merge(program, b=2)

    assert len(result.misses) == 1
    assert result.fired == {"merge-convolutions": 1}
    assert calls(program).count("aten.conv2d") == 2


def test_refuses_groups_and_transposed_ones() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, 4, 5, 5)
    ys = [convolution(b, x, f"t{i}", transposed=True) for i in range(2)]
    ys += [convolution(b, x, f"g{i}", transposed=False, groups=2) for i in range(2)]
    program = b.done(*ys)
    before = to_text(program.graph)
    result = MergeConvolutions().run(program, RewriteContext("optimize"))

    assert refused(result) == {(MissCode.ARGUMENT, y.name) for y in ys}
    assert to_text(program.graph) == before


def test_refuses_what_is_given_at_run_time_tied_or_read_elsewhere() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, 4, 5, 5)
    given = b.arg("given", torch.float32, 3, 4, 1, 1)
    bias = b.arg("bias", torch.float32, 3)
    tied = b.const("tied", torch.randn(3, 4, 1, 1))
    other = b.const("other", torch.randn(3, 4, 1, 1))
    ys = [
        b.call(aten.conv2d.default, x, given),
        b.call(aten.conv2d.default, x, other, bias),
        b.call(aten.conv2d.default, x, tied),
    ]
    program = b.done(*ys, b.call(aten.neg.default, tied))
    before = to_text(program.graph)
    result = MergeConvolutions().run(program, RewriteContext("optimize"))

    assert refused(result) == {
        (MissCode.NOT_CONSTANT, "given"),
        (MissCode.NOT_CONSTANT, "bias"),
        (MissCode.SHARED, "tied"),
    }
    assert to_text(program.graph) == before


def test_refuses_a_reader_of_memory() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, 4, 5, 5)
    ys = [Conv(3, kernel=(1, 1)).node(b, x, 4, f"w{i}") for i in range(2)]
    rigid = b.call(aten.as_strided.default, ys[0], [3], [1])
    result = MergeConvolutions().run(b.done(rigid, ys[1]), RewriteContext("optimize"))

    assert refused(result) == {(MissCode.ORDER, rigid.name)}
    assert not result.fired


def test_refuses_what_does_not_pay() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 64, 4, 56, 56)
    ys = [Conv(64, kernel=(1, 1)).node(b, x, 4, f"w{i}") for i in range(2)]
    # The next convolution wants what it reads in one piece.
    program = b.done(*(Conv(2).node(b, y, 64, f"n{i}") for i, y in enumerate(ys)))
    result = MergeConvolutions().run(
        program, RewriteContext("optimize", CostModel(CostProfile.pinned()))
    )

    assert MissCode.PROFIT in {miss.code for _, miss in result.misses}
    assert not result.fired


def test_the_gate_is_asked() -> None:
    program = siblings(Conv(3), Conv(5))
    banned = RewriteBudget(banned=frozenset({"optimize/merge-convolutions"}))
    assert not MergeConvolutions().run(program, RewriteContext("optimize", budget=banned)).fired


def test_again_there_is_nothing_to_do() -> None:
    program = siblings(Conv(3, INT8), Conv(5, INT8))
    merge(program, b=2)
    assert not merge(program, b=2).fired


def test_a_view_of_a_convolution_reads_every_argument() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, 4, 5, 5)
    found = as_convolution(convolution(b, x, "w", transposed=True))
    assert found is not None
    assert (found.axis, found.transposed, found.groups) == (1, True, 1)
    assert {name for name, _ in found.geometry} == {
        "stride", "padding", "dilation", "transposed", "output_padding", "groups",
    }  # fmt: skip
    assert as_convolution(x) is None


SPECS = st.none() | st.builds(
    lambda rows, columns, low: replace(INT8, block=(rows, columns, None, None), quant_min=low),
    st.sampled_from((None, 1, 2)),
    st.sampled_from((None, 2, 3)),
    st.sampled_from((-128, -127, -8)),
)
CONVS = st.builds(
    Conv,
    st.integers(1, 4),
    SPECS,
    st.booleans(),
    st.sampled_from((None, torch.int8, torch.float32)),
    st.sampled_from((torch.float32, torch.float64)),  # of the scale
    kernel=st.sampled_from(((1, 1), (3, 2))),
)


@pytest.mark.property
@pytest.mark.numeric
@given(st.lists(CONVS, min_size=2, max_size=5), st.integers(1, 5), st.integers(0, 2))
def test_any_siblings_keep_their_bits(convs: list[Conv], c: int, batch: int) -> None:
    program = siblings(*convs, c=c, lead=(batch,))
    merge(program)
    kinds = {(conv.kernel, conv.spec and conv.spec.block[1:]) for conv in convs}
    assert calls(program).count("aten.conv2d") == len(kinds)


class Inception(nn.Module):
    """Branches of which three begin with a convolution of 1 x 1."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.one = nn.Conv2d(8, 6, 1)
        self.three = nn.Sequential(
            nn.Conv2d(8, 4, 1), nn.ReLU(), nn.Conv2d(4, 6, 3, padding=1), nn.ReLU()
        )
        self.five = nn.Sequential(
            nn.Conv2d(8, 2, 1), nn.ReLU(), nn.Conv2d(2, 4, 5, padding=2), nn.ReLU()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        return torch.cat([torch.relu(self.one(x)), self.three(x), self.five(x)], 1)


@pytest.mark.numeric
@pytest.mark.parametrize("quantize", [False, True])
def test_float_branches_of_a_model_merge(quantize: bool) -> None:
    x = torch.randn(1, 3, 8, 8)
    model: nn.Module = Inception().eval()
    if quantize:
        model = recipes.quantize(model, "w8a8-static", (x,)).model
    fast = qfuse.compile(
        model, (x,), target=Target.for_testing(), check="site", options={"backend": "eager"}
    )

    notes = [e.note for e in fast.report.events if isinstance(e, Fired)]
    # Quantized results stay quantized: each has parameters of its own.
    assert ("6 + 4 + 2" in notes) == (not quantize)
    again = torch.randn(1, 3, 8, 8)
    torch.testing.assert_close(
        fast(again), model(again), atol=2e-2 if quantize else 1e-5, rtol=1e-3
    )
    assert fast(again).stride() == model(again).stride()
