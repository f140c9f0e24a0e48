"""Snapshots of the four stages, and which nodes of them correspond."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.export import Dim

import qfuse
from qfuse import pipeline
from qfuse.ir.events import RolledBack
from qfuse.pipeline import Plan
from qfuse.rewrite.compare import Verdict
from qfuse.snapshots import STAGES, byte_count, corresponding
from qfuse.targets import Target
from tests.support.graphs.reported_models import Blocks


def plan_of(model: nn.Module, *args: torch.Tensor, **given: object) -> Plan:
    eager = {"backend": "eager", "own_kernels": False}
    target = Target.for_testing()
    return qfuse.compile(model.eval(), args, target=target, options=eager, **given).plan  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(Blocks(2), torch.randn(3, 16))


def test_there_is_one_snapshot_of_each_stage(plan: Plan) -> None:
    assert tuple(stage.stage for stage in plan.stages) == STAGES
    for stage in plan.stages:
        assert stage.nodes[-1].op == "output"


def test_operands_are_nodes_that_come_first(plan: Plan) -> None:
    for stage in plan.stages:
        seen = set[str]()
        for node in stage.nodes:
            assert set(node.inputs) <= seen
            seen.add(node.name)
        assert len(seen) == len(stage.nodes)


def test_the_last_snapshot_is_the_graph_that_runs(plan: Plan) -> None:
    assert [n.name for n in plan.stages[-1].nodes] == [n.name for n in plan.lowered.graph.nodes]


def test_origins_are_captured_nodes(plan: Plan) -> None:
    captured = {node.name for node in plan.stages[0].nodes}

    for stage in plan.stages:
        for node in stage.nodes:
            assert node.origins, node.name
            assert set(node.origins) <= captured, node.name


def test_a_fused_op_corresponds_to_all_that_it_consumed(plan: Plan) -> None:
    captured, _, optimized, _ = plan.stages
    linears = [node for node in optimized.nodes if node.op == "qfuse.linear"]
    names = corresponding(optimized, captured)
    ops = {node.name: node.op for node in captured.nodes}
    consumed = Counter(ops[name] for name in names[linears[0].name])

    assert len(linears) >= 4
    assert consumed["aten.linear"] == 1
    assert consumed["aten.round"] >= 1


def test_correspondence_is_the_same_in_both_directions(plan: Plan) -> None:
    for one, other in zip(plan.stages, plan.stages[1:], strict=False):
        there, back = corresponding(one, other), corresponding(other, one)
        forward = {(a, b) for a, several in there.items() for b in several}
        assert forward == {(a, b) for b, several in back.items() for a in several}


def test_lowered_nodes_name_the_op_that_they_implement(plan: Plan) -> None:
    optimized = {node.name: node for node in plan.stages[2].nodes}
    sites = {node.site for node in plan.stages[3].nodes if node.site}
    kinds = {optimized[site].op for site in sites if site in optimized}

    assert "qfuse.linear" in kinds
    assert "qfuse.quantize" in kinds


def test_places_are_kept(plan: Plan) -> None:
    linear = next(node for node in plan.stages[0].nodes if node.op == "aten.linear")

    assert linear.module == "blocks.0.up"
    assert "nn.functional.linear" in linear.source
    assert linear.type == "float32[3, 32]"
    assert linear.bytes == 3 * 32 * 4


def test_symbolic_sizes_count_as_traced() -> None:
    plan = plan_of(
        nn.Linear(8, 4), torch.randn(3, 8), dynamic_shapes={"input": {0: Dim("rows", min=2)}}
    )
    linear = next(node for node in plan.stages[0].nodes if node.op == "aten.linear")

    assert linear.bytes == 3 * 4 * 4


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (torch.zeros(2, 3, dtype=torch.int8), 6),
        (torch.zeros(0, 3), 0),
        ((torch.zeros(2), torch.zeros(3)), 20),
        (3, None),
        (None, None),
        ((), None),
    ],
    ids=str,
)
def test_bytes_of_values(value: object, count: int | None) -> None:
    assert byte_count(value) == count


def test_a_rewrite_that_is_tried_again_leaves_one_snapshot_per_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verdicts = iter([Verdict("wrong")])
    real = pipeline._verdict
    monkeypatch.setattr(pipeline, "_verdict", lambda *a: next(verdicts, None) or real(*a))
    plan = plan_of(Blocks(1), torch.randn(3, 16))

    assert plan.lowered.log.of(RolledBack)
    assert tuple(stage.stage for stage in plan.stages) == STAGES
