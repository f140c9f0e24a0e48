"""Which parts of a program are equal blocks, and where it is cut."""

from __future__ import annotations

import pytest
import torch
from tests.support.graphs.lowered import aten, decode_constants, decode_graph, finish
from tests.support.graphs.repeated import gained_layer, residual_layer, stacked, weights
from torch.fx import Node

from qfuse.backends.blocks.find import Blocks, find_blocks
from qfuse.backends.blocks.text import read_occurrence
from qfuse.backends.prepare import prepare
from qfuse.ir.graph.stage_graph import LoweredGraph
from qfuse.ir.refusal import Refusal
from qfuse.testing.build import GraphBuilder


def found(graph: LoweredGraph, least: int = 3) -> Blocks:
    blocks = find_blocks(prepare(graph), least)
    assert isinstance(blocks, Blocks), blocks
    return blocks


def refused(graph: LoweredGraph, least: int = 3) -> str:
    refusal = find_blocks(prepare(graph), least)
    assert isinstance(refusal, Refusal), refusal
    return refusal.reason


def ops(nodes: tuple[Node, ...]) -> str:
    return " ".join(str(node.target).split(".")[1] for node in nodes)


def test_the_residual_add_and_the_next_norm_stay_in_one_block() -> None:
    blocks = found(stacked(5))

    assert ops(blocks.before) == "cos sin mul mean add rsqrt mul mul"
    assert len(blocks.occurrences) == 4
    assert {ops(one.nodes) for one in blocks.occurrences} == {
        "linear add mul mean add rsqrt mul mul"
    }
    assert ops(blocks.after) == "linear add sum"
    assert blocks.fused == 0


def test_a_block_returns_what_the_next_one_reads() -> None:
    blocks = found(stacked(4))
    first, second, *_ = blocks.occurrences

    crossing = [first.nodes[position] for position in blocks.outputs]
    assert ops(tuple(crossing)) == "add mul"
    assert set(crossing) < set(second.outside)
    # The third value is the same for all blocks.
    assert len(set(first.outside) & set(second.outside)) == 1


def test_where_a_library_makes_the_last_value_only_one_crosses() -> None:
    def layer(b: GraphBuilder, x: Node, outside: Node, number: int) -> Node:
        y = b.call(aten.mul.Tensor, b.call(aten.tanh.default, x), outside)
        return b.call(aten.linear.default, y, b.const(f"w{number}", weights(number, 16, 16)))

    blocks = found(stacked(4, layer))

    assert len(blocks.occurrences) == 4
    assert ops(blocks.occurrences[0].nodes) == "tanh mul linear"
    assert blocks.outputs == (2,)


def test_small_constants_that_differ_become_inputs() -> None:
    blocks = found(stacked(4, gained_layer([0.5, 1.5, 2.5, 3.5])))

    assert [blocks.occurrences[0].constants[i] for i in blocks.lifted] == ["c1"]


def test_small_constants_that_are_equal_stay_constants() -> None:
    assert found(stacked(4, gained_layer([0.5] * 4))).lifted == ()


def test_what_reads_memory_by_number_stays_whole() -> None:
    def layer(b: GraphBuilder, x: Node, outside: Node, number: int) -> Node:
        y = b.call(aten.linear.default, x, b.const(f"w{number}", weights(number, 16, 16)))
        turned = b.call(aten.as_strided.default, y, [3, 16], [1, 3])
        return b.call(aten.mul.Tensor, turned, outside)

    assert "reads the memory of its operand" in refused(stacked(4, layer, rows=3))


def test_what_differs_in_a_scalar_is_another_block() -> None:
    def layer(b: GraphBuilder, x: Node, outside: Node, number: int) -> Node:
        y = b.call(aten.add.Tensor, x, outside)
        y = b.call(aten.linear.default, y, b.const(f"w{number}", weights(number, 16, 16)))
        return b.call(aten.mul.Tensor, y, 3.0 if number == 2 else 2.0)

    blocks = found(stacked(7, layer))

    # Four layers follow, and the cut is before the sum of the first of them.
    assert len(blocks.occurrences) == 3
    assert all(3.0 not in node.args for one in blocks.occurrences for node in one.nodes)
    assert refused(stacked(5, layer)) == "no part of the graph occurs 3 times in a row"


def test_what_reads_other_places_is_another_block() -> None:
    def layer(b: GraphBuilder, x: Node, outside: Node, number: int) -> Node:
        del outside
        w = b.const(f"w{number}", weights(number, 16, 16))
        y = b.call(aten.linear.default, x, w)
        # Every second layer reads one value twice.
        return b.call(aten.mul.Tensor, y, y if number % 2 else x)

    blocks = found(stacked(8, layer))

    assert {len(one.nodes) for one in blocks.occurrences} == {4}


def test_a_value_of_which_only_the_size_is_read_does_not_cross() -> None:
    def layer(b: GraphBuilder, x: Node, outside: Node, number: int) -> Node:
        del outside
        y = b.call(aten.linear.default, x, b.const(f"w{number}", weights(number, 16, 16)))
        z = b.call(aten.tanh.default, y)
        return b.call(aten.view.default, z, [b.call(aten.sym_size.int, y, 0), 16])

    blocks = found(stacked(5, layer))

    assert len(blocks.outputs) == 1
    assert blocks.fused == 0


def test_values_that_are_broadcast_to_the_blocks_have_a_price() -> None:
    def layer(b: GraphBuilder, x: Node, outside: Node, number: int) -> Node:
        y = b.call(aten.linear.default, x, b.const(f"w{number}", weights(number, 16, 16)))
        return b.call(aten.tanh.default, b.call(aten.add.Tensor, y, outside))

    def graph(shape: list[int]) -> LoweredGraph:
        b = GraphBuilder()
        stream = b.arg("x", torch.float32, 3, 16)
        outside = b.call(aten.cos.default, b.arg("angle", torch.float32, 16))
        wide = b.call(aten.expand.default, outside, shape)
        for number in range(4):
            stream = layer(b, stream, wide, number)
        return finish(b, [stream])

    assert found(graph([3, 16])).broadcast == 3 * 16 * 4
    assert found(graph([1, 16])).broadcast == 0
    # A product, a sum and its tanh.
    assert found(graph([3, 16])).made == 3 * (3 * 16 * 4)


def test_a_weight_that_is_used_twice_is_not_two_weights() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3, 16)
    values = [weights(seed, 16, 16) for seed in range(2)]
    first, second = (b.const(f"w{i}", value) for i, value in enumerate(values))
    once = b.call(aten.linear.default, b.call(aten.linear.default, x, first), first)
    twice = b.call(aten.linear.default, b.call(aten.linear.default, x, first), second)
    program = prepare(finish(b, [once, twice]))
    calls = [node for node in program.module.graph.nodes if node.op == "call_function"]

    equal, other = (read_occurrence(program, calls[i : i + 2]) for i in (0, 2))

    assert (equal.constants, other.constants) == (("c0",), ("c0", "c1"))
    assert equal.text[0] == other.text[0]
    assert equal.text[1] != other.text[1]


def test_refuses_state() -> None:
    reason = refused(decode_graph(decode_constants()))

    assert reason.startswith("the model keeps state or writes its inputs (")


def test_refuses_random_numbers() -> None:
    def layer(b: GraphBuilder, x: Node, outside: Node, number: int) -> Node:
        del number
        return b.call(aten.mul.Tensor, b.call(aten.rand_like.default, x), outside)

    assert refused(stacked(4, layer)) == "aten.rand_like.default draws random numbers"


def test_refuses_an_alias_through_all_blocks() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 4, 4)
    view, total = x, x
    for _ in range(5):
        view = b.call(aten.view.default, view, [4, 4])
        total = b.call(aten.add.Tensor, b.call(aten.tanh.default, total), view)

    reason = refused(finish(b, [total]))

    assert reason.startswith("a block would return ")
    assert reason.endswith(", an alias of what it reads")


@pytest.mark.parametrize("layers", [1, 2])
def test_refuses_what_occurs_less_often(layers: int) -> None:
    assert refused(stacked(layers)) == "no part of the graph occurs 3 times in a row"


def test_occurrences_may_be_asked_for() -> None:
    assert len(found(stacked(7), 6).occurrences) == 6
    assert refused(stacked(5, residual_layer), 6) == "no part of the graph occurs 6 times in a row"
