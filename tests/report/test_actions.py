"""Notes that say what to do are listed with the reasons of ops."""

from __future__ import annotations

import pytest

from qfuse.analysis import LintFinding, Severity
from qfuse.ir.events import (
    EXPAND,
    Estimated,
    Event,
    ExpandCause,
    Left,
    Lowered,
    MissCode,
    Missed,
    Noted,
    Place,
    RolledBack,
)
from qfuse.report import Report

FIRST = Place("a", "qfuse.quantize", "model.py:1: y", "layers.0")
SECOND = Place("b", "qfuse.quantize", "model.py:1: y", "layers.1")


def clipped(place: Place, predicted_us: float | None = None) -> Noted:
    finding = LintFinding(
        "clipped-range", Severity.WARNING, place, "half is cut", "calibrate", predicted_us
    )
    return finding.note()


def actions(*events: Event) -> list[tuple[str, str | None, tuple[Place, ...], float | None]]:
    found = Report(events).actions
    return [
        (f"{a.tried}: {a.reason}", a.advice.do if a.advice else None, a.places, a.seconds)
        for a in found
    ]


def test_findings_of_one_kind_are_one_action() -> None:
    assert actions(clipped(FIRST, 2.0), clipped(SECOND), clipped(FIRST, 1.0)) == [
        ("clipped-range: half is cut", "calibrate", (FIRST, SECOND), 3e-6)
    ]
    text = Report((clipped(FIRST), clipped(SECOND))).text()
    assert "1. clipped-range: half is cut (2 places)\n   model.py:1: y  [layers.0]" in text
    assert "   do: calibrate\n" in text


def test_a_finding_is_in_the_json_and_comes_back() -> None:
    report = Report((clipped(FIRST, 2.0),))

    assert Report.from_json(report.to_json()) == report


def test_a_place_that_has_advice_has_no_second_one() -> None:
    """The weight axis is a finding of the lint, and a reason of the kernel."""
    op = Place("c", "qfuse.linear", FIRST.source, FIRST.module)
    reason = "the weight's scales run along the input features"
    miss = Missed("lower", "linear-w8a8", MissCode.NO_KERNEL, reason, op, op, 1)
    (alone,) = actions(miss)
    assert alone[1] is not None
    assert actions(miss, clipped(FIRST)) == [alone]
    assert len(actions(miss, clipped(SECOND))) == 2


def test_a_warning_about_an_import_stays_a_reason() -> None:
    note = Noted("normalize", "it is not known", FIRST, warn=True)

    assert actions(note) == [("import: it is not known", None, (FIRST,), None)]


ATTENTION = Place("d", "aten.scaled_dot_product_attention", FIRST.source, FIRST.module)


@pytest.mark.parametrize(
    ("rule", "cause"),
    [
        ("merge-queries", "aten.scaled_dot_product_attention: it computes in float"),
        ("fuse-attention", "fuse-attention: several tokens"),
    ],
)
def test_a_product_is_not_float_because_it_was_not_merged(rule: str, cause: str) -> None:
    costs = Estimated("optimize", ATTENTION, 100, 3e-6, 1e-6)
    miss = Missed("optimize", rule, MissCode.SHAPE, "several tokens", ATTENTION, ATTENTION, 3)

    ((text, *_),) = actions(costs, miss)

    assert text == cause


def test_a_quantize_that_is_read_by_a_kernel_is_no_near_miss() -> None:
    """It is recognized, whatever computes its scale."""
    choose = Missed(
        "normalize", "choose-asymmetric", MissCode.PATTERN, "expected a, found b", FIRST, FIRST, 2
    )
    assert len(actions(choose)) == 1
    reason = "its parameters are computed at run time"
    assert actions(choose, Left("lower", FIRST, reason, needed=True)) == []
    assert len(actions(choose, Left("lower", FIRST, reason, needed=False))) == 1


def test_a_place_that_was_rolled_back_is_one_action() -> None:
    op = Place("c", "qfuse.linear", FIRST.source, FIRST.module)
    undone = RolledBack("lower", "lower-linear", "key", (op,), "the values differ", "")
    size = Estimated("lower", op, 100, 2e-6, 1e-6)
    kernel = Lowered(
        "lower",
        op,
        EXPAND,
        why="its kernel is not permitted",
        cause=ExpandCause.DENIED,
        losers=(("linear-w4a8", "the weight's values span more than 15"),),
    )
    (alone,) = actions(size, kernel, undone)

    assert alone == ("lower-linear: rolled back: the values differ", None, (op,), None)
    assert len(actions(size, kernel)) == 1
