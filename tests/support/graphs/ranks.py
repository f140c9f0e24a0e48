"""Runs one graph on several ranks at once, so that what travels between them can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from qfuse.ir.graph.schema import arguments
from qfuse.ir.graph.stage_graph import StageGraph


def run_on_ranks(
    program: StageGraph,
    inputs: Sequence[Sequence[torch.Tensor]],
    constants: Sequence[dict[str, torch.Tensor]] | None = None,
) -> list[list[torch.Tensor]]:
    """Return the outputs of every rank.

    Args:
        program: The graph that all ranks run.
        inputs: Inputs of every rank.
        constants: Constants that are others than in the graph, of every rank.
    """
    count = len(inputs)
    known: list[dict[Node, Any]] = [{} for _ in range(count)]
    given = [iter(values) for values in inputs]
    for node in program.graph.nodes:
        if node.op == "output":
            return [map_arg(list(node.args[0]), known[rank].__getitem__) for rank in range(count)]
        values: list[Any]
        if node.op == "placeholder":
            values = [next(each) for each in given]
        elif node.op == "get_attr":
            own = program.module.get_buffer(str(node.target))
            values = [
                (constants or [{}] * count)[rank].get(node.target, own) for rank in range(count)
            ]
        else:
            values = _call(node, known)
        for rank, value in enumerate(values):
            known[rank][node] = value
    raise AssertionError("a graph ends with its output")


def _call(node: Node, known: Sequence[dict[Node, Any]]) -> list[Any]:
    name = str(node.target)
    if "_c10d_functional" not in name:
        calls = [map_arg((node.args, node.kwargs), k.__getitem__) for k in known]
        return [node.target(*args, **kwargs) for args, kwargs in calls]  # type: ignore[operator]
    a = arguments(node)
    sent = [k[next(iter(node.all_input_nodes))] for k in known]
    if "wait_tensor" in name:
        return sent
    assert all(value.is_contiguous() for value in sent), "a collective takes dense tensors"
    if "all_gather" in name:
        return [torch.cat(sent) for _ in known]
    went: Any = a["input_split_sizes"]
    parts = [value.split(went) for value in sent]
    return [torch.cat([rows[rank] for rows in parts]) for rank in range(len(known))]
