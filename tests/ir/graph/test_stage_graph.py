"""What a node of a stage's graph stands for: a constant, an op, a place in the source."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from qfuse.ir.graph.stage_graph import (
    MODULE_META,
    MUTABLE_META,
    SOURCE_META,
    CapturedGraph,
    LoweredGraph,
    NormalGraph,
    OptimizedGraph,
    StageGraph,
    constant_of,
    op_name,
    place_of,
)
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.spec import QuantSpec
from qfuse.ir.stages.verify import STAGES
from qfuse.testing.build import GraphBuilder

aten = torch.ops.aten


def test_a_constant_is_the_buffer_itself() -> None:
    b = GraphBuilder()
    value = torch.randn(3)
    node = b.const("w", value)

    found = constant_of(node)
    assert found is not None
    assert found.data_ptr() == value.data_ptr()


def test_inputs_calls_and_written_buffers_are_no_constants() -> None:
    b = GraphBuilder()
    x, w = b.arg("x", torch.float32, 3), b.const("w", torch.randn(3))
    y = b.call(aten.add.Tensor, x, w)
    assert [constant_of(n) is None for n in (x, y, w)] == [True, True, False]

    w.meta[MUTABLE_META] = True
    assert constant_of(w) is None


def test_ops_have_short_names() -> None:
    b = GraphBuilder()
    x, scale = b.arg("x", torch.float32, 2, 3), b.const("scale", torch.ones(1, 1))
    spec = str(QuantSpec(torch.int8, -128, 127, (None, None)))
    nodes = (
        x,
        scale,
        b.call(ops.quantize, x, scale, None, spec),
        b.call(aten.add.Tensor, x, x),
    )

    names = ["placeholder", "get_attr", "qfuse.quantize", "aten.add.Tensor"]
    assert [op_name(n) for n in nodes] == names


def test_a_place_is_the_users_line_and_module() -> None:
    b = GraphBuilder()
    y = b.call(aten.neg.default, b.arg("x", torch.float32, 3))
    bare = place_of(y)
    assert (bare.node, bare.op, bare.source, bare.module) == (y.name, "aten.neg", "", "")

    y.meta |= {SOURCE_META: "model.py:3", MODULE_META: "layers.0.mlp"}
    place = place_of(y)
    assert (place.source, place.module) == ("model.py:3", "layers.0.mlp")


def test_every_stage_has_a_type_and_a_spec() -> None:
    stages = (CapturedGraph, NormalGraph, OptimizedGraph, LoweredGraph)

    assert [stage.stage for stage in stages] == list(STAGES)
    assert StageGraph.stage not in STAGES


def test_a_stage_shares_the_graph_and_cannot_be_changed() -> None:
    b = GraphBuilder()
    program = b.done(b.call(aten.neg.default, b.arg("x", torch.float32, 3)))
    later = OptimizedGraph(program.module, program.signature, program.log)

    assert later.graph is program.graph
    with pytest.raises(dataclasses.FrozenInstanceError):
        later.module = program.module  # type: ignore[misc]
