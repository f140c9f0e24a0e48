"""Merge sites: they are what they say, both forms compute the same, and the score is worked out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from rich.console import Console
from tests.support.bench.results import SETTING
from torch import nn
from torch.fx import Graph

from qfuse.backends import CompiledModule
from qfuse.backends.eager import EagerRunner
from qfuse.cost import AtPoints, Comparison, CostModel, CostProfile
from qfuse.ir.errors import OptionsError
from qfuse.ir.graph.text import to_text
from qfuse.ir.stages.verify import verify
from qfuse.kernels import KernelLibrary
from qfuse.optimize.merge.merge_linears import MergeLinears, price
from qfuse.options import BuiltinBackend
from qfuse.targets import Target
from qfuse_bench.experiments.merge_sites import ModelSites, SiteOptions, SiteResults, run_sites
from qfuse_bench.harness.measure import Series
from qfuse_bench.report.markdown import render
from qfuse_bench.workloads.measure_site import Bench, Measured
from qfuse_bench.workloads.model_sites import cut, sites_of
from qfuse_bench.workloads.site_grid import KINDS, Site, grid_inputs, site_graph

COST = CostModel(CostProfile.pinned())
BENCH = Bench(Target.for_testing(), COST, KernelLibrary(False, "test"), backend="eager")
LINEAR = torch.ops.aten.linear.default
SMALL = Site("small", 8, (6, 2, 2))


def comparison(before: float, after: float) -> Comparison:
    return Comparison(AtPoints(before, before, before), AtPoints(after, after, after))


def series(*seconds: float) -> Series:
    rounds = [seconds[i % len(seconds)] for i in range(15)]
    return Series(rounds, rounds)


ROW = Measured(
    "small", "float f32", 4, 8, (6, 2), comparison(3e-6, 2e-6), series(2e-3), series(1e-3)
)
WRONG = replace(ROW, merged=series(3e-3))
EQUAL = replace(ROW, merged=series(2.02e-3))
UNSURE = replace(ROW, merged=series(1e-3, 4e-3))


@pytest.mark.parametrize("name", KINDS)
def test_a_site_has_one_group_of_the_widths_that_it_says(name: str) -> None:
    program = site_graph(SMALL, KINDS[name], "m")
    verify(program)
    (group,) = MergeLinears().groups(program)

    assert [sibling.n for sibling in group] == [6, 2, 2]
    assert {sibling.shape[1] for sibling in group} == {8}


def test_rows_are_priced_as_they_are_measured() -> None:
    program = site_graph(SMALL, KINDS["float f32"], "m")
    static = site_graph(SMALL, KINDS["float f32"], 32)
    (group,), (same,) = MergeLinears().groups(program), MergeLinears().groups(static)

    assert price(group, program, COST, 32) == price(same, static, COST)
    assert price(group, program, COST, 32) != price(group, program, COST, 512)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("leaves", [False, True])
def test_both_forms_give_the_same(name: str, leaves: bool) -> None:
    site = replace(SMALL, leaves=leaves)
    program = site_graph(site, KINDS[name], "m")
    before = to_text(program.graph)
    pair = BENCH.pair(program)
    inputs = grid_inputs(site, KINDS[name], 5)
    apart, merged = (pair.forms[form](*inputs) for form in ("apart", "merged"))

    assert to_text(program.graph) == before
    real = KINDS[name].float_dtype
    for a, b in zip(apart, merged, strict=True):
        assert a.dtype == real
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b)


def _graph_of(form: CompiledModule) -> Graph:
    assert isinstance(form.runner, EagerRunner)
    return form.runner.module.graph


def test_the_two_forms_are_two() -> None:
    pair = BENCH.pair(site_graph(SMALL, KINDS["float f32"], "m"))
    counts = {
        name: len(_graph_of(form).find_nodes(op="call_function", target=LINEAR))
        for name, form in pair.forms.items()
    }

    assert counts == {"apart": 3, "merged": 1}


def test_both_are_timed_in_every_round() -> None:
    pair = BENCH.pair(site_graph(SMALL, KINDS["float f32"], "m"))
    apart, merged = pair.run(grid_inputs(SMALL, KINDS["float f32"], 4), 15, 1e-4)

    assert len(apart.rounds) == len(merged.rounds) == 15


def test_only_a_sure_difference_counts() -> None:
    assert [row.counts for row in (ROW, WRONG, EQUAL, UNSURE)] == [True, True, False, False]
    assert (ROW.decision, ROW.right) == (True, True)
    assert (WRONG.decision, WRONG.right) == (True, False)
    declined = replace(WRONG, predicted=comparison(2e-6, 3e-6))
    assert (declined.decision, declined.right) == (False, True)


def test_the_score_is_of_what_counts() -> None:
    def results(*rows: Measured) -> SiteResults:
        return SiteResults(SETTING, 15, rows, 0.0)

    assert results(*[ROW] * 9, WRONG).score == pytest.approx(0.9)
    assert results(*[ROW] * 9, WRONG).good
    assert not results(*[ROW] * 8, WRONG, EQUAL).good
    assert results(EQUAL, UNSURE).score is None
    assert results(EQUAL).good
    assert_expected_inline(
        results(ROW, WRONG, EQUAL).verdict(),
        """3 cells, of which 2 differ by more than 5% with an interval that excludes no difference: the decision is right in 1 (50%); the aim is at least 90%.""",
    )


def test_the_page_shows_the_rows() -> None:
    results = SiteResults(SETTING, 15, (ROW, WRONG, EQUAL), 0.0)
    text = render("sites", results=results)

    assert "| small | float f32 | 4 | 8 | 6 + 2 | 0.67 | 2.00 | 1.00 |" in text
    assert "merge, right |" in text
    assert "merge, **wrong** |" in text
    assert "| merge |" in text
    assert results.verdict() in text


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 6), nn.Linear(8, 2)
        self.gate, self.up = nn.Linear(8, 4), nn.Linear(8, 4)
        self.down = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.softmax(self.q(x), -1).sum(-1, keepdim=True) + self.k(x).sum(-1, True)
        x = torch.layer_norm(x * scores, (8,))
        inner: torch.Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return x + inner


def model(layers: int) -> nn.Module:
    return nn.Sequential(*(Layer() for _ in range(layers))).eval()


def test_golden_a_site_is_cut_out_with_what_is_fused_behind_it() -> None:
    sites = sites_of(model(2), (torch.randn(3, 5, 8),), {}, COST)

    assert [(s.name, s.kind, s.m, s.k, s.widths, s.count) for s in sites] == [
        ("0.q + k", "float float32", 15, 8, (6, 2), 2),
        ("0.gate + up", "float float32", 15, 8, (4, 4), 2),
    ]
    assert [tuple(x.shape) for x in sites[0].inputs()] == [(3, 5, 8)]
    assert_expected_inline(
        "\n\n".join(to_text(site.program.graph) for site in sites),
        """\
%x1: float32[3, 5, 8]
const %c2: float32[6, 8]
const %c3: float32[6]
%0 = aten.linear(%x1, %c2, %c3): float32[3, 5, 6]
const %c4: float32[2, 8]
const %c5: float32[2]
%1 = aten.linear(%x1, %c4, %c5): float32[3, 5, 2]
%2 = aten.slice.Tensor(%0, 1, 0, 1): float32[3, 1, 6]
%3 = aten.neg(%2): float32[3, 1, 6]
%4 = aten.slice.Tensor(%1, 1, 0, 1): float32[3, 1, 2]
%5 = aten.neg(%4): float32[3, 1, 2]
return (%3, %5)

%x1: float32[3, 5, 8]
const %c2: float32[4, 8]
const %c3: float32[4]
%0 = aten.linear(%x1, %c2, %c3): float32[3, 5, 4]
const %c4: float32[4, 8]
const %c5: float32[4]
%1 = aten.linear(%x1, %c4, %c5): float32[3, 5, 4]
%2 = aten.silu(%0): float32[3, 5, 4]
%3 = aten.mul.Tensor(%2, %1): float32[3, 5, 4]
return (%3)""",
    )


def test_scales_that_come_from_outside_are_positive() -> None:
    program = site_graph(SMALL, KINDS["dynamic int8 f32"], 4)
    alone, scales = cut(MergeLinears().groups(program)[0], program)

    assert len(alone.signature.inputs) == 2
    assert scales == {alone.signature.inputs[1].name}


def test_sizes_that_vary_are_refused() -> None:
    x = torch.randn(3, 5, 8)
    shapes = ({0: torch.export.Dim("b", min=1, max=9)},)
    program = torch.export.export(model(1), (x,), dynamic_shapes=shapes)
    with pytest.raises(OptionsError, match="sizes of the model vary"):
        sites_of(program, (x,), {}, COST)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (SiteOptions(rounds=3), "too few"),
        (SiteOptions(threads=-1), "cannot be"),
        (SiteOptions(kinds=("int3",)), "unknown kind 'int3'"),
        (SiteOptions(sites=("gpt",)), "unknown site 'gpt'"),
    ],
)
def test_refuses_what_cannot_be_measured(options: SiteOptions, message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        run_sites(options, Console(quiet=True))


@pytest.mark.thorough
def test_a_models_sites_are_measured_and_written(tmp_path: Path) -> None:
    to = tmp_path / "sites.json"
    threads = torch.get_num_threads()
    options = SiteOptions(json=to, patience=0.0, backend=BuiltinBackend.EAGER)
    mine = ModelSites("mine", model(1), (torch.randn(3, 5, 8),), {})
    results = run_sites(options, Console(quiet=True), mine)

    assert torch.get_num_threads() == threads
    assert [row.site for row in results.rows] == ["0.q + k", "0.gate + up"]
    written = json.loads(to.read_text())
    assert [row["widths"] for row in written["rows"]] == [[6, 2], [4, 4]]
    assert {"ratio", "decision", "right", "counts", "predicted"} <= set(written["rows"][0])
