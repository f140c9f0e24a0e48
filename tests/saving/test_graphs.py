"""Graphs come back with the same nodes; what cannot be written, and what is unknown, is refused."""

from __future__ import annotations

import json
import mmap
from typing import Any

import pytest
import torch
from tests.support.graphs.lowered import aten, decode_constants, decode_graph, projection_graph
from torch.fx import Graph, GraphModule

from qfuse.ir.errors import ModelFileError
from qfuse.saving.graphs import graph_from_data, graph_to_data
from qfuse.saving.tensors import TensorReader, TensorWriter


def through(module: GraphModule, **changes: Any) -> GraphModule:
    writer = TensorWriter()
    data = {**graph_to_data(module, writer), **changes}
    table = writer.table()
    block = b"".join(writer.chunks())
    mapped = mmap.mmap(-1, max(len(block), 1))
    mapped[: len(block)] = block
    reader = TensorReader(mapped, 0, len(block), table)
    return graph_from_data(json.loads(json.dumps(data)), reader)


def lines(module: GraphModule) -> list[str]:
    names = {node: f"%{i}" for i, node in enumerate(module.graph.nodes)}
    return [
        f"{node.op} {node.target} {torch.fx.map_arg((node.args, node.kwargs), names.__getitem__)}"
        for node in module.graph.nodes
    ]


@pytest.mark.parametrize("name", ["projection", "decode"])
def test_graphs_survive(name: str) -> None:
    made = projection_graph() if name == "projection" else decode_graph(decode_constants())
    again = through(made.module)
    assert lines(again) == lines(made.module)
    for key, value in again.named_buffers():
        assert torch.equal(value, made.module.get_buffer(key))


def graph(target: Any, *args: Any, **kwargs: Any) -> GraphModule:
    made = Graph()
    x = made.placeholder("x")
    made.output((made.call_function(target, (x, *args), kwargs),))
    return GraphModule(torch.nn.Module(), made)


def test_arguments_of_every_kind() -> None:
    made = Graph()
    x = made.placeholder("x")
    size = made.call_function(aten.sym_size.int, (x, 0))
    half = made.call_function(__import__("operator").floordiv, (size, 2))
    rows = made.call_function(aten.index.Tensor, (x, [None, x]))
    both = made.call_function(aten.cat.default, ([rows, x], -1))
    out = made.call_function(
        aten.full.default,
        ([half, 3], float("-inf")),
        {"dtype": torch.bfloat16, "device": torch.device("cpu"), "pin_memory": False},
    )
    made.output((both, out, both))
    module = GraphModule(torch.nn.Module(), made)
    again = through(module)
    assert lines(again) == lines(module)


def test_buffers_in_submodules_and_written_ones() -> None:
    made = Graph()
    made.output((made.get_attr("encoder.0.weight"),))
    root = torch.nn.Module()
    root.add_module("encoder", torch.nn.Sequential(torch.nn.Linear(2, 2)))
    writer = TensorWriter()
    root.register_buffer("steps", torch.tensor(3))
    module = GraphModule(root, made, "M")
    module.register_buffer("steps", root.get_buffer("steps"))
    data = graph_to_data(module, writer, ["steps"])
    assert set(data["tensors"]) == {"encoder.0.weight", "steps"}
    again = through(module)
    assert torch.equal(again()[0], root.get_parameter("encoder.0.weight"))


def test_constants_of_a_sequence_begin_with_a_digit() -> None:
    root, made = torch.nn.Module(), Graph()
    root.register_buffer("0_weight_packed", torch.arange(3.0))
    made.output((made.get_attr("0_weight_packed"),))
    (found,) = through(GraphModule(root, made))()
    assert torch.equal(found, torch.arange(3.0))


def test_python_functions_are_refused() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x + x

    with pytest.raises(ModelFileError, match="which is not an operator"):
        through(graph(twice))


def test_arguments_without_a_text_are_refused() -> None:
    with pytest.raises(ModelFileError, match=r"argument of aten\.add\.Tensor is a bytes"):
        through(graph(aten.add.Tensor, b"x"))


def test_unknown_operators_are_named() -> None:
    nodes = [["call_function", "their_shop.twist.default", {"$tuple": []}, {}]]
    with pytest.raises(ModelFileError, match=r"operator their_shop.twist.default") as error:
        through(graph(aten.neg.default), nodes=nodes)
    assert "'their_shop'" in str(error.value.fix)


@pytest.mark.parametrize(
    "node",
    [
        ["placeholder", "x): import os #", {"$tuple": []}, {}],
        ["get_attr", "a; import os", {"$tuple": []}, {}],
        ["call_module", "x", {"$tuple": []}, {}],
        ["call_function", "os.system", {"$tuple": ["true"]}, {}],
        ["call_function", "builtins.eval", {"$tuple": ["1"]}, {}],
    ],
    ids=lambda node: node[1],
)
def test_other_nodes_are_not_made(node: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"not a name|a node|unpack"):
        through(graph(aten.neg.default), nodes=[node])
