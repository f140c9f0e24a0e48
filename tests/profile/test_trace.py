"""Traces parse, lanes do not overlap, durations add up, and memory ends at the outputs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.graphs.reported_models import Blocks
from torch import nn

import qfuse
from qfuse.cost import CostProfile
from qfuse.profile import Profile, profile_plan
from qfuse.profile.memory import live_bytes
from qfuse.profile.trace import explorer_data, explorer_graphs
from qfuse.targets import Target


def compiled(model: nn.Module, *args: torch.Tensor) -> qfuse.CompiledModel:
    options = {"backend": "eager", "own_kernels": False}
    return qfuse.compile(model.eval(), args, target=Target.for_testing(), options=options)


@pytest.fixture(scope="module")
def fast() -> qfuse.CompiledModel:
    return compiled(Blocks(2), torch.randn(3, 16))


@pytest.fixture(scope="module")
def measured(fast: qfuse.CompiledModel) -> Profile:
    inputs = [torch.randn(3, 16)]
    return profile_plan(fast.plan, fast.runner, inputs, CostProfile.pinned(), seconds=0.0)


@pytest.fixture(scope="module")
def events(measured: Profile, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = Path(tmp_path_factory.mktemp("trace"), "trace.json")
    measured.save_chrome_trace(path)
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found


def lane(events: Iterable[dict[str, Any]], number: int) -> list[tuple[int, int]]:
    """Start and end in nanoseconds."""
    spans = [e for e in events if e["ph"] == "X" and e["tid"] == number]
    return [(round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3)) for e in spans]


@pytest.mark.parametrize("number", [1, 2])
def test_ops_of_a_lane_do_not_overlap(events: list[dict[str, Any]], number: int) -> None:
    spans = lane(events, number)

    assert spans
    assert all(end == start for (_, end), (start, _) in pairwise(spans))


def test_durations_add_up(events: list[dict[str, Any]], measured: Profile) -> None:
    predicted = sum(round(op.predicted * 1e9) for op in measured.ops if op.predicted is not None)

    assert lane(events, 1)[-1][1] == measured.nanoseconds
    assert lane(events, 2)[-1][1] == predicted


def test_lanes_are_named(events: list[dict[str, Any]]) -> None:
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}

    assert names == {1: "measured, op by op", 2: "predicted"}


def test_memory_is_never_negative_and_ends_at_the_outputs(
    events: list[dict[str, Any]],
) -> None:
    counters = [e for e in events if e["ph"] == "C"]
    values = [e["args"]["bytes"] for e in counters]
    times = [e["ts"] for e in counters]

    assert min(values) >= 0
    assert times == sorted(times)
    # The result, and the new value of the counter of calls.
    assert values[-1] == 3 * 16 * 4 + 8


def test_views_hold_what_they_view() -> None:
    class Views(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            big = torch.relu(x)
            part = big[0]
            other = torch.neg(x)
            return part + other[1]

    fast = compiled(Views(), torch.randn(4, 8))
    points = {point.node: point for point in live_bytes(fast.plan.lowered.graph)}
    last = list(points.values())[-1]

    # Both values live until their views are added.
    assert last.during == 2 * 4 * 8 * 4 + 8 * 4
    assert last.after == 8 * 4


def test_a_value_that_nothing_reads_is_freed_at_once() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    unused = graph.call_function(torch.ops.aten.relu.default, (x,))
    used = graph.call_function(torch.ops.aten.neg.default, (x,))
    graph.output((used,))
    for node in (x, unused, used):
        node.meta["val"] = torch.zeros(10)
    first, second = live_bytes(graph)

    assert (first.during, first.after) == (40, 0)
    assert (second.during, second.after) == (40, 40)


def test_sizes_may_be_given() -> None:
    fast = compiled(nn.ReLU(), torch.randn(4, 8))
    (point,) = live_bytes(fast.plan.lowered.graph, {"relu": 1000})

    assert point.after == 1000


def test_graphs_for_model_explorer(fast: qfuse.CompiledModel) -> None:
    graphs = json.loads(json.dumps(explorer_graphs(fast.plan.stages)))["graphs"]

    assert [graph["id"] for graph in graphs] == ["captured", "normalized", "optimized", "lowered"]
    for graph in graphs:
        ids = {node["id"] for node in graph["nodes"]}
        edges = {edge["sourceNodeId"] for node in graph["nodes"] for edge in node["incomingEdges"]}
        assert edges <= ids
        assert len(ids) == len(graph["nodes"])
    assert any(node["namespace"] == "blocks/0/up" for node in graphs[0]["nodes"])


def test_data_for_model_explorer_name_nodes_of_the_graphs(
    fast: qfuse.CompiledModel, measured: Profile
) -> None:
    data = explorer_data({"lowered": {op.name: op.nanoseconds / 1e3 for op in measured.ops}})
    names = {node.name for node in fast.plan.stages[-1].nodes}

    assert set(data["lowered"]["results"]) <= names
    assert data["lowered"]["results"][measured.ops[0].name]["value"] > 0
    assert [stop["stop"] for stop in data["lowered"]["gradient"]] == [0, 1]
