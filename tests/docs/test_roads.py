"""The page shows that each way to qfuse fuses the same sites. ``make docs`` writes the table."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.graphs.tiny_models import TINY
from torch import nn

import qfuse
from qfuse import zoo
from qfuse.dynamo import backend
from qfuse.exported import optimize
from qfuse.ir.events import Lowered
from qfuse.report import Report
from qfuse.targets import Target
from qfuse.zoo import recipes
from qfuse_bench.report.markdown import replace_section

PAGE = Path(__file__).resolve().parents[2] / "docs" / "roads.md"
QUICK = (("bert", "w8a8-dynamic"), ("llama", "w8a16"), ("resnet", "w8a8-static"))
MATRIX = (
    ("bert", "w8a8-dynamic"),
    ("bert", "w8a16"),
    ("bert", "w4a8"),
    ("llama", "w8a8-dynamic"),
    ("llama", "w8a16"),
    ("llama-decode", "w8a16"),
    ("vit", "w8a8-dynamic"),
    ("whisper-encoder", "w4a8"),
    ("resnet", "w8a8-static"),
    ("mobilenet", "w8a8-static"),
    ("densenet", "w8a8-static"),
    ("unet", "w8a8-static"),
    ("convnext", "w8a8-static"),
)
COMMON: dict[str, Any] = {
    # What is fused does not depend on what a machine can compile.
    "options": {"backend": "eager", "own_kernels": False},
    "target": Target.for_testing(),
}
# Why a road fuses other sites than `qfuse.compile`, by model, recipe and road.
REASONS: dict[tuple[str, str, str], str] = {}
ROADS = ("`qfuse.compile`", '`torch.compile(backend="qfuse")`', "`qfuse.optimize`")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def sites(reports: tuple[Report, ...]) -> Counter[str]:
    """The quantized ops of all graphs, each by what it computes."""
    events = [event for report in reports for event in report.events]
    return Counter(event.what for event in events if isinstance(event, Lowered))


def left(reports: tuple[Report, ...]) -> int:
    return sum(len(report.left) for report in reports)


@cache
def by_road(name: str, recipe: str) -> tuple[tuple[Report, ...], ...]:
    """The reports of a model on each road."""
    model = zoo.build(name, **TINY[name])
    args, kwargs = model.args, dict(model.kwargs)
    calibration = [(args, kwargs)]
    made: nn.Module = recipes.quantize(model.module, recipe, args, kwargs, None, calibration).model
    direct = qfuse.compile(made, args, kwargs, **COMMON)
    with torch.no_grad(), warnings.catch_warnings():
        torch.compiler.reset()
        options = {**COMMON["options"], "target": COMMON["target"]}
        dynamo = torch.compile(made, backend=backend, options=options)
        dynamo(*args, **kwargs)
        program = optimize(torch.export.export(made, args, kwargs), **COMMON)
    return qfuse.reports(direct), qfuse.reports(dynamo), qfuse.reports(program)


def row(name: str, recipe: str) -> str:
    found = by_road(name, recipe)
    cells = [f"{sites(found[0]).total()} quantized ops, {left(found[0])} left"]
    for road, reports in zip(ROADS[1:], found[1:], strict=True):
        same = (sites(reports), left(reports)) == (sites(found[0]), left(found[0]))
        other = f"{sites(reports).total()} quantized ops, {left(reports)} left"
        reason = REASONS.get((name, recipe, road), "no reason is known")
        cells.append("the same" if same else f"{other}: {reason}")
    return f"| {name} | {recipe} | {' | '.join(cells)} |"


def table() -> str:
    head = [f"| model | recipe | {' | '.join(ROADS)} |", "|---|---|---|---|---|"]
    return "\n".join([*head, *(row(*each) for each in MATRIX)])


@pytest.mark.parametrize(
    ("name", "recipe"),
    [each if each in QUICK else pytest.param(*each, marks=pytest.mark.thorough) for each in MATRIX],
)
def test_every_road_fuses_the_same_sites(name: str, recipe: str) -> None:
    direct, *others = by_road(name, recipe)
    assert sites(direct).total() >= 2
    for road, reports in zip(ROADS[1:], others, strict=True):
        if (name, recipe, road) not in REASONS:
            assert sites(reports) == sites(direct)
            assert left(reports) == left(direct)


@pytest.mark.parametrize(("name", "recipe"), QUICK)
def test_the_page_has_the_row(name: str, recipe: str) -> None:
    assert row(name, recipe) in PAGE.read_text(encoding="utf-8").splitlines()


@pytest.mark.thorough
def test_the_page_shows_what_happens() -> None:
    text = PAGE.read_text(encoding="utf-8")
    written = replace_section(text, "ways", table())
    if os.environ.get("QFUSE_WRITE_DOCS"):
        PAGE.write_text(written, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == written
