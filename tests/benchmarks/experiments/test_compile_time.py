"""Synthetic graphs have the linears that they say, and the figures are worked out right."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from tests.support.bench.results import SETTING

from qfuse.cost import CostModel, CostProfile
from qfuse.ir.events import Lowered
from qfuse.ir.stages.verify import verify
from qfuse.kernels import KernelLibrary
from qfuse.pipeline import Pipeline
from qfuse.targets import Target
from qfuse_bench.experiments.compile_time import CostRow, _linears, growth, verdicts
from qfuse_bench.harness._torch_api import propagate
from qfuse_bench.harness.stats import median
from qfuse_bench.report.markdown import render
from qfuse_bench.workloads.block_graphs import BLOCK, blocks

ROW = CostRow("PT2E static", 50, 250, (0.2, 0.1, 0.3), (0.1, 0.1, 0.1))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("linears", [1, 13])
def test_blocks_have_so_many_linears(linears: int, dynamic: bool) -> None:
    graph = blocks(linears, dynamic=dynamic)
    verify(graph)
    ops = Counter(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
    count = BLOCK * math.ceil(linears / BLOCK)

    assert ops["aten.linear.default"] == count
    assert ops["quantized_decomposed.dequantize_per_channel.default"] == count
    # Three of a block's six linears share one quantize; each has a dequantize of its own.
    form = "tensor" if dynamic else "default"
    assert ops[f"quantized_decomposed.quantize_per_tensor.{form}"] == count * 4 // BLOCK
    assert ops[f"quantized_decomposed.dequantize_per_tensor.{form}"] == count


@pytest.mark.parametrize("dynamic", [False, True])
def test_every_linear_of_a_block_is_recognized(dynamic: bool) -> None:
    captured = blocks(BLOCK, dynamic=dynamic)
    target = Target.for_testing()
    pipeline = Pipeline(target, CostModel(CostProfile.pinned()), KernelLibrary(False, "test"))
    lowered = pipeline.rewrite(captured)

    assert _linears(lowered.log) == BLOCK
    # Queries, keys and values are one.
    linears = [e for e in lowered.log.of(Lowered) if e.place.op == "qfuse.linear"]
    assert len(linears) == BLOCK - 2


def test_a_propagation_leaves_the_graph_alone() -> None:
    captured = blocks(BLOCK)
    before = str(captured.graph)
    propagate(captured.module)

    assert str(captured.graph) == before


def test_a_ratio_is_of_medians_and_its_spread_of_rounds() -> None:
    assert ROW.ratio == pytest.approx(2.0)
    assert list(ROW.spread) == pytest.approx([1.0, 3.0])
    assert ROW.per_linear == pytest.approx(0.004)


def test_growth_is_from_the_smallest_to_the_greatest() -> None:
    twice = replace(ROW, linears=100, optimize=(0.4,))
    worse = replace(ROW, linears=200, optimize=(1.2,))

    assert growth([worse, ROW, twice]) == pytest.approx(1.5)
    assert growth([ROW, twice]) == pytest.approx(1.0)


def test_verdicts_name_the_dearest_graph() -> None:
    rows = [ROW, replace(ROW, linears=100, optimize=(0.9,)), replace(ROW, graph="minilm")]

    assert verdicts(rows) == [
        "The dearest graph (PT2E static) costs 9.00 propagations to optimize; the aim is at most 3.",
        "PT2E static: from 50 to 100 linears the cost per linear changes by a factor of 2.25.",
    ]


def test_the_page_shows_the_rows() -> None:
    text = render("compile-cost", rows=[ROW], setting=SETTING, verdicts=["One."], median=median)

    assert "| PT2E static | 50 | 250 | 200 | 100 | 2.00 [1.00, 3.00] | 4000 |" in text
    assert "Some CPU" in text
    assert "One." in text
