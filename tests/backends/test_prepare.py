"""The graph that is handed to a compiler: canonical names, state as inputs, writes at the end."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.graphs.lowered import (
    aten,
    decode_constants,
    decode_graph,
    finish,
    projection_graph,
)
from torch.fx import Node

from qfuse.backends.key import program_text
from qfuse.backends.prepare import Program, prepare
from qfuse.ir.errors import BackendError
from qfuse.testing.build import GraphBuilder


def text(program: Program) -> str:
    """The text of a program, without the digests of its constants."""
    lines = program_text(program).splitlines()
    return "\n".join(line.split(" cpu ")[0] for line in lines)


def written(program: Program) -> list[str]:
    return [program.names[position] for position in program.written]


def late(program: Program) -> list[str]:
    return [program.names[position] for _, position in program.late]


def test_golden_decode_step() -> None:
    program = prepare(decode_graph(decode_constants()))

    assert_expected_inline(
        text(program),
        """\
%0 = placeholder x0 () {}
torch.float32[1, 2, 1, 8](16, 8, 8, 1) cpu
%1 = placeholder x1 () {}
torch.int64[1](1) cpu
%2 = placeholder x2 () {}
torch.float32[1, 2, 16, 8](256, 128, 8, 1) cpu
%3 = placeholder s0 () {}
torch.float32[6](1) cpu
%4 = placeholder s1 () {}
torch.float32[1, 2, 16, 8](256, 128, 8, 1) cpu
%5 = placeholder s2 () {}
torch.float32[3](1) cpu
%6 = placeholder s3 () {}
torch.float32[3](1) cpu
%7 = placeholder s4 () {}
torch.int64[]() cpu
%8 = placeholder s5 () {}
torch.float32[3](1) cpu
%9 = get_attr c0 () {}
%10 = call_function aten.index_copy.default (%4, 2, %1, %0) {}
%11 = call_function aten.mul.Tensor (%0, %9) {}
%12 = call_function aten.index_put.default (%2, [None, None, %1], %11) {}
%13 = call_function aten.add.Tensor (%7, 1) {}
%14 = call_function aten.add.Tensor (%3, 1.0) {}
%15 = call_function aten.transpose.int (%10, 2, 3) {}
%16 = call_function aten.matmul.default (%0, %15) {}
%17 = call_function aten.slice.Tensor (%4, 2, 0, 2) {}
%18 = call_function aten.mul.Tensor (%8, 2.0) {}
%19 = call_function aten.clone.default (%17) {}
%20 = call_function aten.scalar_tensor.default (0) {}
%21 = call_function aten.copy_.default (%4, %10) {}
%22 = call_function aten.copy_.default (%2, %12) {}
%23 = call_function aten.copy_.default (%7, %13) {}
%24 = call_function aten.clone.default (%6) {}
%25 = call_function aten.clone.default (%5) {}
%26 = output output ((%16, %19, %20, %18, %13, %24, %25, %14)) {}
c0 = torch.float32[]()""",
    )
    assert program.names == ("q", "pos", "values", "base", "keys", "left", "right", "steps", "tail")
    # The two that are swapped would read each other, and `base` is read through `tail` too.
    assert written(program) == ["keys", "values", "steps"]
    assert late(program) == ["left", "right", "base"]
    assert program.returned == ((2, 2),)


def test_golden_dynamic_sizes() -> None:
    assert_expected_inline(
        text(prepare(projection_graph())),
        """\
%0 = placeholder x0 () {}
torch.float32[z0~5, 16](16, 1) cpu
%1 = placeholder x1 () {}
torch.int64[z0~5](1) cpu
%2 = get_attr c0 () {}
%3 = get_attr c1 () {}
%4 = get_attr c2 () {}
%5 = get_attr c3 () {}
%6 = call_function aten.linear.default (%0, %2) {}
%7 = call_function aten.mul.Tensor (%6, %4) {}
%8 = call_function aten.embedding.default (%3, %1) {}
%9 = call_function aten.add.Tensor (%7, %8) {}
%10 = call_function aten.view.default (%9, [-1, 2, 4]) {}
%11 = call_function aten.mul.Tensor (%10, %5) {}
%12 = call_function qfuse_backend_tests.twist.default (%9, %4, 2.0) {}
%13 = call_function aten.sum.dim_IntList (%0, [0]) {}
%14 = call_function aten.slice.Tensor (%0, 1, 0, 4) {}
%15 = call_function aten.t.default (%9) {}
%16 = call_function aten.neg.default (%15) {}
%17 = output output ((%11, %12, %13, %14, %5, %16)) {}
c0 = torch.float32[8, 16](16, 1)
c1 = torch.float32[10, 8](8, 1)
c2 = torch.float32[]()
c3 = torch.float32[4](1)
x0_0 in 1..4096
z0 in VR[2, 4096]""",
    )


def test_the_lowered_graph_stays_as_it_was() -> None:
    lowered = decode_graph(decode_constants())
    before = str(lowered.graph), {k: v.clone() for k, v in lowered.module.named_buffers()}
    prepare(lowered)

    assert str(lowered.graph) == before[0]
    for name, value in lowered.module.named_buffers():
        assert torch.equal(value, before[1][name])


def test_equal_constants_are_passed_once() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 4)
    weight = torch.randn(4)
    nodes = [b.const(name, weight) for name in ("first", "second")]
    nodes += [b.const("copy", weight.clone()), b.const("view", weight.view(2, 2))]
    sums = [b.call(aten.add.Tensor, x, node) for node in nodes[:3]]
    program = prepare(finish(b, [*sums, nodes[3]]))

    # Equal bits elsewhere are not the same memory, and may be written one by one.
    assert list(program.constants) == ["c0", "c1", "c2"]
    assert all(p.requires_grad is False for p in program.module.parameters())
    assert program.module.get_parameter("c0").data_ptr() == weight.data_ptr()


def view_of(b: GraphBuilder, node: Node) -> Node:
    return b.call(aten.transpose.int, node, 0, 1)


def part_of(b: GraphBuilder, node: Node) -> Node:
    return b.item(b.call(aten.split.Tensor, node, 2), 0)


def copy_of(b: GraphBuilder, node: Node) -> Node:
    return b.call(aten.clone.default, node)


def same_as(b: GraphBuilder, node: Node) -> Node:
    return b.call(aten.slice_scatter.default, b.call(aten.neg.default, node), node)


@pytest.mark.parametrize("make", [view_of, part_of, copy_of, same_as])
def test_values_that_may_be_another_target_are_written_late(make: object) -> None:
    assert callable(make)
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, 2)
    first, second = b.const("first", torch.randn(2, 2)), b.const("second", torch.randn(2, 2))
    writes = [("first", b.call(aten.add.Tensor, first, x)), ("second", make(b, first))]
    program = prepare(finish(b, [b.call(aten.mul.Tensor, second, x)], writes))

    assert written(program) == ["first"]
    assert late(program) == ["second"]


def test_a_value_that_is_its_target_is_not_written() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2)
    buffer = b.const("buffer", torch.zeros(2))
    program = prepare(finish(b, [b.call(aten.add.Tensor, x, buffer)], [("buffer", buffer)]))

    assert not program.written
    assert not program.late


def test_refuses_an_opaque_constant() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, 2)
    weight = b.const("weight", torch.eye(2))
    graph = finish(b, [b.call(aten.mm.default, x, weight)])
    graph.module.register_buffer("weight", torch.eye(2).to_sparse())
    with pytest.raises(BackendError, match=r"constant weight is a torch.sparse_coo tensor"):
        prepare(graph)
