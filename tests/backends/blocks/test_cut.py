"""Parts of a program, run one after another, compute what the whole computes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.graphs.lowered import aten, finish
from tests.support.graphs.repeated import gained_layer, residual_layer, run_parts, stacked, weights
from torch.fx import Node

from qfuse import zoo
from qfuse.backends.blocks.cut import CutProgram, cut_blocks
from qfuse.backends.blocks.find import Blocks, find_blocks
from qfuse.backends.blocks.wiring import NOWHERE
from qfuse.backends.key import program_text
from qfuse.backends.prepare import Program, prepare
from qfuse.capture import capture
from qfuse.ir.graph.stage_graph import LoweredGraph
from qfuse.testing.build import GraphBuilder


def parts_of(graph: LoweredGraph) -> tuple[CutProgram, Program]:
    program = prepare(graph)
    blocks = find_blocks(program)
    assert isinstance(blocks, Blocks), blocks
    made = cut_blocks(program, blocks)
    assert isinstance(made, CutProgram), made
    return made, program


def assert_equal_bits(graph: LoweredGraph, *inputs: torch.Tensor) -> CutProgram:
    made, program = parts_of(graph)
    with torch.no_grad():
        want = program.module(*inputs)
        got = run_parts(made, program, inputs)
    assert len(got) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    return made


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_any_number_of_rows(rows: int) -> None:
    made = assert_equal_bits(stacked(4), torch.randn(rows, 16), torch.randn(16))

    assert len(made.parts) == 3
    assert [step.part for step in made.wiring.steps] == [0, 1, 1, 1, 2]


def test_small_constants_that_differ_are_values_of_the_table() -> None:
    graph = stacked(4, gained_layer([0.5, 1.5, 2.5, 3.5]))
    made = assert_equal_bits(graph, torch.randn(3, 16), torch.randn(16))

    assert len(made.wiring.held) == 4
    assert "torch.float32[]" not in program_text(made.parts[1]).split("output")[1]


def test_models_of_another_depth_have_the_same_parts() -> None:
    shallow, _ = parts_of(stacked(4))
    deep, _ = parts_of(stacked(9))

    # The constants of the parts before and after the blocks are not those of the other model.
    assert program_text(shallow.parts[0]) == program_text(deep.parts[0])
    assert len(deep.wiring.steps) == 10


def test_a_size_is_that_of_an_input_of_each_part() -> None:
    made, program = parts_of(stacked(4))

    (name,) = (size.name for size in program.sizes.values())
    assert all(set(sizes.values()) == {name} for sizes in made.sizes)


def test_sizes_are_computed_anew_in_each_part() -> None:
    def layer(b: GraphBuilder, x: Node, outside: Node, number: int) -> Node:
        y = b.call(aten.linear.default, x, b.const(f"w{number}", weights(number, 16, 16)))
        rows = b.call(aten.sym_size.int, x, 0)
        split = b.call(aten.view.default, b.call(aten.mul.Tensor, y, outside), [rows, 4, 4])
        flat = b.call(
            aten.reshape.default, b.call(aten.permute.default, split, [0, 2, 1]), [-1, 16]
        )
        return b.call(aten.tanh.default, flat)

    assert_equal_bits(stacked(4, layer), torch.randn(5, 16), torch.randn(16))


def test_an_input_and_a_constant_may_be_results() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3, 16)
    last = b.const("last", weights(50, 4))
    stream = x
    for number in range(4):
        stream = residual_layer(b, stream, x, number)
    made = assert_equal_bits(finish(b, [last, stream, x]), torch.randn(3, 16))

    assert len(made.wiring.results) == 3


def test_what_only_one_block_returns_is_kept_of_that_one() -> None:
    b = GraphBuilder()
    stream = product = b.arg("x", torch.float32, 3, 16)
    for number in range(4):
        weight = b.const(f"w{number}", weights(number, 16, 16))
        product = b.call(aten.linear.default, stream, weight)
        stream = b.call(aten.tanh.default, product)
    made = assert_equal_bits(finish(b, [stream, product]), torch.randn(3, 16))

    kept = [sum(number != NOWHERE for number in step.outputs) for step in made.wiring.steps]
    assert kept[:3] == [1, 1, 1]
    assert len(made.wiring.steps[0].outputs) == 2


def test_a_small_constant_that_differs_may_be_a_result() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3, 16)
    stream, layer = x, gained_layer([0.5, 1.5, 2.5, 3.5])
    for number in range(4):
        stream = layer(b, stream, x, number)
    gain = b.graph.find_nodes(op="get_attr")[1]
    made = assert_equal_bits(finish(b, [stream, gain]), torch.randn(3, 16))

    # A caller may write to a result: it is made in each call.
    assert not set(made.wiring.held) & set(made.wiring.results)


def test_a_graph_may_be_nothing_but_blocks() -> None:
    b = GraphBuilder()
    stream = b.arg("x", torch.float32, 3, 16)
    for number in range(4):
        weight = b.const(f"w{number}", weights(number, 16, 16))
        stream = b.call(aten.linear.default, b.call(aten.tanh.default, stream), weight)
    made = assert_equal_bits(finish(b, [stream]), torch.randn(3, 16))

    assert [step.part for step in made.wiring.steps] == [0, 0, 0, 0]


CALLS = ("linear", "tanh", "outside", "residual", "gain", "first", "transpose")


@pytest.mark.property
@given(
    calls=st.lists(st.sampled_from(CALLS), min_size=2, max_size=7),
    times=st.integers(3, 5),
    rows=st.sampled_from(["n", 16]),
    keep=st.booleans(),
)
def test_random_chains(calls: list[str], times: int, rows: int | str, keep: bool) -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, rows, 16)
    outside = b.call(aten.cos.default, x)
    stream, streams = b.call(aten.sin.default, x), []
    for number in range(times):
        begin = stream
        for place, call in enumerate(calls):
            stream = _called(b, call, stream, begin, outside, number * 10 + place)
        streams.append(stream)
    graph = finish(b, [b.call(aten.neg.default, stream), *(streams if keep else [])])
    program = prepare(graph)
    blocks = find_blocks(program)
    if not isinstance(blocks, Blocks):
        return

    made = cut_blocks(program, blocks)

    assert isinstance(made, CutProgram), made
    inputs = [torch.randn(16, 16)]
    with torch.no_grad():
        want, got = program.module(*inputs), run_parts(made, program, inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def _called(b: GraphBuilder, call: str, x: Node, begin: Node, outside: Node, number: int) -> Node:
    match call:
        case "linear":
            return b.call(aten.linear.default, x, b.const(f"w{number}", weights(number, 16, 16)))
        case "outside" | "residual":
            other = outside if call == "outside" else begin
            return b.call(aten.add.Tensor, x, other)
        case "gain" | "first":
            value = torch.tensor(float(number % 3)) if call == "gain" else torch.ones(())
            return b.call(aten.mul.Tensor, x, b.const(f"{call}{number}", value))
        case "transpose" if isinstance(x.meta["val"].shape[0], int):
            return b.call(aten.t.default, x)
        case _:
            return b.call(aten.tanh.default, x)


@pytest.mark.zoo
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama", {"layers": 5, "kv_heads": 2, "vocab": 128, "seq": 12}),
        ("bert", {"layers": 5, "vocab": 128, "seq": 12, "batch": 2}),
    ],
)
def test_models_with_dynamic_sizes(name: str, sizes: dict[str, int]) -> None:
    small = {"hidden": 64, "heads": 4, "intermediate": 96}
    model = zoo.build(name, **small, **sizes)
    captured = capture(model.module, model.args, model.kwargs, dynamic_shapes=model.dynamic_shapes)
    graph = LoweredGraph(captured.module, captured.signature, captured.log)

    for some in ({}, {"batch": 3, "seq": 7} if name == "bert" else {"seq": 7}):
        args, kwargs = model.inputs(3, **some)
        tensors = [*args, *kwargs.values()]
        made = assert_equal_bits(graph, *tensors)
        assert len(made.wiring.steps) >= 4
