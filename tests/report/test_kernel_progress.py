"""For an op without a kernel, every view names the kernel that came closest, and how close."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from tests.report.advice.models import Weighted, activations, static, weight

import qfuse
from qfuse.ir.events import EXPAND, Estimated, ExpandCause, KernelProgress, Lowered, Place
from qfuse.report import Report
from qfuse.report.actions import actions_of
from qfuse.report.page import page_html
from qfuse.report.page.data import page_data
from qfuse.targets import Target

pytestmark = [pytest.mark.export, pytest.mark.own_kernels]

GROUPED, GENERAL, FLOAT = "qfuse.linear_w4a8", "qfuse.linear_w8a8", "qfuse.linear_w4a16"
ALONG = "the weight's scales run along the input features, one each: kernels take one per "


@cache
def explained() -> Report:
    """The report of a linear whose weight has one scale per input feature."""

    def forward(m: Weighted, x: torch.Tensor) -> torch.Tensor:
        return F.linear(static(x), weight(m, axis=1))

    made: Report = qfuse.explain(Weighted(forward), activations(), target=Target.for_testing())
    return made


def expanded() -> Lowered:
    (event,) = explained().expanded
    return event


def test_the_event_counts_the_conditions_of_every_kernel() -> None:
    event = expanded()
    found = {one.kernel: one for one in event.progress}

    assert [one.kernel for one in event.progress] == [name for name, _ in event.losers]
    assert found[GENERAL] == KernelProgress(
        GENERAL, 9, 17, "the weight has one scale, or one per output feature"
    )
    assert found[GROUPED] == KernelProgress(
        GROUPED, 14, 18, "the weight has scales of groups of input features that kernels know"
    )
    assert event.closest.startswith(f"{GROUPED} (14 of 18 conditions hold): {ALONG}")


def test_the_tables_have_the_kernel_that_came_closest_first() -> None:
    text = " ".join(explained().text(verbose=True, width=2000).split())
    near, far = f"{GROUPED} (14 of 18 conditions hold)", f"{GENERAL} (9 of 17 conditions hold)"

    assert near in text
    assert text.index(near) < text.index(far)


def test_the_first_screen_names_the_same_kernel() -> None:
    (action,) = explained().actions

    assert action.tried == GROUPED
    assert action.advice is not None
    assert f"{GROUPED}: the weight's scales" in explained().text()
    assert GENERAL not in explained().text()


def lost(*kernels: tuple[str, int, str]) -> tuple[str, str]:
    """The kernel and the reason that the first screen has for an op that these refused."""
    place = Place("linear", "qfuse.linear")
    event = Lowered(
        "lower",
        place,
        EXPAND,
        losers=tuple((name, reason) for name, _, reason in kernels),
        cause=ExpandCause.NO_KERNEL,
        progress=tuple(KernelProgress(name, held, 10) for name, held, _ in kernels),
    )
    (action,) = actions_of((Estimated("lower", place, 1000, 9e-6, 1e-6), event))
    return action.tried, action.reason


def test_without_a_suggestion_the_closest_kernel_is_named() -> None:
    assert lost(("general", 2, "one"), ("close", 8, "two"), ("other", 5, "three"))[0] == "close"
    # Of those that came equally close the most general one, which is the first.
    assert lost(("general", 5, "one"), ("other", 5, "two"))[0] == "general"
    # What is asked twice has the reason of the last time.
    assert lost(("a", 9, "first"), ("b", 5, "b"), ("a", 6, "last")) == ("a", "last")
    assert lost(("a", 9, "first"), ("b", 5, "b"), ("a", 2, "last")) == ("b", "b")


def test_a_kernel_that_a_suggestion_helps_is_named_before_a_closer_one() -> None:
    assert lost(("close", 9, "one"), (GROUPED, 2, ALONG), (GENERAL, 1, ALONG))[0] == GROUPED


def test_the_page_gives_it_as_the_reason() -> None:
    data = page_data(explained(), None, {})
    (row,) = [row for row in data["sites"] if row["status"] == "expanded"]
    closest = f"{GROUPED} (14 of 18 conditions hold): {ALONG}"

    why, _, near = data["text"][row["why"]].partition("; closest, ")
    assert why == expanded().why
    assert near.startswith(closest)
    lines = data["text"][row["losers"]].split("\n")
    assert lines[0].startswith(f"{GROUPED} (14 of 18 conditions hold)")
    general = f"{GENERAL} (9 of 17 conditions hold)"
    assert [ALONG in line for line in lines if general in line] == [True]
    assert "14 of 18 conditions hold" in page_html(explained(), None, {})


def test_json_has_the_counts_and_the_condition() -> None:
    text = explained().to_json()
    (event,) = [one for one in json.loads(text)["events"] if one["kind"] == "lowered"]

    assert {
        "kernel": GENERAL,
        "held": 9,
        "conditions": 17,
        "failed": "the weight has one scale, or one per output feature",
    } in event["progress"]
    assert Report.from_json(text).events == explained().events


def test_a_report_of_an_earlier_version_is_read() -> None:
    data = json.loads(explained().to_json())
    for event in data["events"]:
        event.pop("progress", None)
    (event,) = Report.from_json(json.dumps(data)).expanded

    assert event.losers == expanded().losers
    assert "conditions hold" not in event.closest
