"""What the page holds: all sites, all nodes, and nothing that is run or fetched."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.graphs.reported_models import Blocks

import qfuse
from qfuse.cost import CostProfile
from qfuse.ir.errors import OptionsError
from qfuse.ir.events import Left, MissCode, Missed, Noted, Place
from qfuse.profile import Profile, profile_plan
from qfuse.report import Report
from qfuse.report.facts import Facts
from qfuse.report.page import page_html
from qfuse.report.page.data import page_data
from qfuse.report.page.summary import all_to_do
from qfuse.snapshots import STAGES, NodeSnapshot, StageSnapshot
from qfuse.targets import Target
from qfuse_bench.workloads.report_pages import many_sites

EVIL = '</script><script>alert(1)</script><img src=x onerror="alert(1)">\u2028{{ 7 * 7 }}<!--'


@pytest.fixture(scope="module")
def fast() -> qfuse.CompiledModel:
    # Products as small as these are faster in float.
    options = {"backend": "eager", "own_kernels": False, "prefer": "memory"}
    target = Target.for_testing()
    return qfuse.compile(Blocks(2).eval(), (torch.randn(3, 16),), target=target, options=options)


@pytest.fixture(scope="module")
def measured(fast: qfuse.CompiledModel) -> Profile:
    inputs = [torch.randn(3, 16)]
    return profile_plan(fast.plan, fast.runner, inputs, CostProfile.pinned(), seconds=0.0)


def test_what_is_left_names_the_rule_that_came_closest() -> None:
    place = Place("q", "qfuse.quantize")
    left = Left("lower", place, "no fused op uses it")
    pattern = "neg(x)\n^^^"
    miss = Missed(
        *("optimize", "fuse-output", MissCode.PATTERN, "expected aten.neg", place, place, 2),
        *(pattern, 2, 5),
    )
    data = page_data(Report((left, miss)), None, {})
    (row, _) = data["sites"]
    closest = "fuse-output (2 of 5 conditions hold): expected aten.neg"

    assert row["status"] == "left"
    assert data["text"][row["why"]] == f"no fused op uses it; closest, {closest}"
    assert data["text"][row["pattern"]] == pattern


def test_what_to_do_names_the_module_or_the_line() -> None:
    places = Place("q", "aten.mul", "a/model.py:3: x * y"), Place("r", "aten.mul", "", "layers.0")
    notes = [Noted(place.node, "it clips", place, True, "calibrate") for place in places]

    assert [item.place for item in all_to_do(Report(tuple(notes)))] == [
        "model.py:3: x * y",
        "layers.0",
    ]


class Elements(HTMLParser):
    """The elements of a page with their attributes, and the text of its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts.append(data)
        else:
            self.text.append(data)


def data_of(page: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Elements(page).scripts[0])
    return found


def test_every_event_has_a_row(fast: qfuse.CompiledModel) -> None:
    report = fast.report
    sites = page_data(report, None, {})["sites"]
    kinds = [site["status"] for site in sites]

    assert kinds.count("kernel") == len(report.fused) > 0
    assert kinds.count("left") + kinds.count("needed") == len(report.left) > 0
    assert kinds.count("left") == sum(not event.needed for event in report.left)
    assert kinds.count("not fused") == len(report.closest_misses) > 0


def test_every_node_of_every_stage_is_there(fast: qfuse.CompiledModel) -> None:
    data = page_data(fast.report, None, {})

    for stage, snapshot in zip(data["stages"], fast.plan.stages, strict=True):
        assert stage["node"] == [node.name for node in snapshot.nodes]
        texts = [data["text"][number] for number in stage["op"]]
        assert texts == [node.op for node in snapshot.nodes]


def test_rows_name_the_line_and_the_nodes(fast: qfuse.CompiledModel) -> None:
    data = page_data(fast.report, None, {})
    text, stages = data["text"], data["stages"]
    left = next(site for site in data["sites"] if site["status"] == "left")

    assert "reported_models.py" in text[left["source"]]
    stage, node = left["nodes"][0]
    assert stages[stage]["name"] == "optimized"
    assert text[stages[stage]["op"][node]] == text[left["op"]]
    assert {stages[stage]["name"] for stage, _ in left["nodes"]} >= {"optimized", "lowered"}


def test_times_of_a_site_are_those_of_its_ops(fast: qfuse.CompiledModel, measured: Profile) -> None:
    data = page_data(fast.report, measured, {})
    kernels = [site for site in data["sites"] if site["status"] == "kernel"]
    by_site = {op.site: op.nanoseconds / 1e3 for op in measured.ops if op.work is not None}
    names = [event.place.node for event in fast.report.fused]

    assert [site["us"] for site in kernels] == [by_site[name] for name in names]
    left = [site for site in data["sites"] if site["status"] == "left"]
    assert all(site["us"] > 0 for site in left)
    assert data["total"]["us"] == measured.nanoseconds / 1e3


def test_without_a_profile_the_timeline_has_predictions(fast: qfuse.CompiledModel) -> None:
    data = page_data(fast.report, None, {})
    ops, names = data["ops"], [data["text"][op["op"]] for op in data["ops"]]

    assert all(op["us"] is None and op["predicted"] > 0 for op in ops)
    assert {event.kernel for event in fast.report.fused} <= set(names)
    work = fast.report.work
    assert work is not None
    # Products in float too, and the passes that quantize.
    assert sum(op["predicted"] for op in ops) >= work.predicted_seconds * 1e6 * 0.999


def test_a_report_without_stages_has_its_sites() -> None:
    report = Report((Left("lower", Place("a", "qfuse.quantize"), "why"),), Facts(backend="eager"))
    data = page_data(report, None, {})

    assert data["stages"] == data["ops"] == data["memory"] == []
    assert len(data["sites"]) == 1
    assert data["sites"][0]["nodes"] == []


def evil_report() -> Report:
    place = Place(EVIL, EVIL, EVIL, EVIL)
    stages = tuple(
        StageSnapshot(
            name, (NodeSnapshot(EVIL, EVIL, (), EVIL, 4, EVIL, EVIL, EVIL, (EVIL,), EVIL),)
        )
        for name in STAGES
    )
    events = Left("lower", place, EVIL), Noted("lower", EVIL, None, warn=True)
    return Report(events, Facts(model=EVIL, graph=EVIL), stages)


def test_what_a_model_is_called_is_not_run() -> None:
    page = page_html(evil_report(), None, {EVIL: 3.0})
    elements = Elements(page)

    assert [tag for tag, _ in elements.tags].count("script") == 2
    assert "img" not in [tag for tag, _ in elements.tags]
    assert "alert(1)" not in elements.scripts[1]
    assert "{{ 7 * 7 }}" in "".join(elements.text)
    data = data_of(page)
    assert data["stages"][0]["node"] == [EVIL]
    assert data["text"][data["sites"][0]["source"]] == EVIL


def test_nothing_is_fetched() -> None:
    report, profile = many_sites(20)
    page = page_html(report, profile)
    elements = Elements(page)

    for tag, attributes in elements.tags:
        assert tag not in {"img", "iframe", "link", "object"}
        assert not {"src", "srcset", "action", "style"} & set(attributes)
        assert str(attributes.get("href", "#")).startswith("#")
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttpRequest", page)
    policy = next(a["content"] for t, a in elements.tags if "http-equiv" in a and t == "meta")
    assert str(policy).startswith("default-src 'none'; script-src 'sha256-")


def test_the_page_of_many_sites_is_small() -> None:
    report, profile = many_sites(5000)

    assert len(page_html(report, profile)) < 8e6


def test_the_file_is_written(fast: qfuse.CompiledModel, tmp_path: Path) -> None:
    fast.report.to_html(tmp_path / "page.html")
    fast.report.to_html(str(tmp_path / "named.html"), sqnr={"blocks.0": 31.5})

    assert data_of((tmp_path / "page.html").read_text())["sqnr"] == {}
    assert data_of((tmp_path / "named.html").read_text())["sqnr"] == {"blocks.0": 31.5}


def test_what_does_not_belong_to_the_report_is_refused(
    fast: qfuse.CompiledModel, tmp_path: Path
) -> None:
    to = tmp_path / "page.html"
    with pytest.raises(OptionsError, match=r"sqnr has 'blocks\.7'") as error:
        fast.report.to_html(to, sqnr={"blocks.0": 3.0, "blocks.7": 3.0})
    assert "blocks.1" in str(error.value.fix)
    for wrong, what in (
        ({"blocks.0": "x"}, "sqnr has 'x' for 'blocks.0', a str"),
        ({"blocks.0": None}, "sqnr has None for 'blocks.0'"),
        ({"blocks.0": True}, "sqnr has True for 'blocks.0', a bool"),
        ({3: 31.5}, "sqnr has the key 3, an int"),
        ([("blocks.0", 31.5)], "sqnr is a list"),
    ):
        with pytest.raises(OptionsError, match=re.escape(what)) as error:
            fast.report.to_html(to, sqnr=wrong)  # type: ignore[arg-type]
        assert "ratio in dB" in str(error.value.fix)
    with pytest.raises(OptionsError, match="profile is a str"):
        fast.report.to_html(to, profile="x")  # type: ignore[arg-type]
    with pytest.raises(OptionsError, match="there is no folder"):
        fast.report.to_html(tmp_path / "no" / "page.html")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_left_out(value: float) -> None:
    report, _ = many_sites(5)

    assert data_of(page_html(report, None, {"layers.0": value}))["sqnr"] == {}


def test_numbers_of_numpy_are_numbers() -> None:
    report, _ = many_sites(5)

    page = page_html(report, None, {"layers.0": np.float32(31.5)})  # type: ignore[dict-item]
    assert data_of(page)["sqnr"] == {"layers.0": 31.5}
