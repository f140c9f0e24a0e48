"""Two reports are compared op by op, and what got worse is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.report.advice.models import Weighted, activations, linear

import qfuse
from qfuse.cli import main
from qfuse.ir.events import EXPAND, Estimated, Event, ExpandCause, Left, Lowered, Place
from qfuse.report import Report
from qfuse.report.diff import diff_reports
from qfuse.report.facts import Facts, TargetFacts
from qfuse.targets import Target

FACTS = Facts(target=TargetFacts("CPU", "x86_64", "AVX512", (), 1), torch_version="2.13.0")


def op(node: str, kernel: str | None, seconds: float = 1e-6, line: int = 1) -> list[Event]:
    kind = "aten.linear" if kernel is None else "qfuse.linear"
    at = Place(node, kind, f"model.py:{line}: y", f"layers.{line}")
    size = Estimated("lower", at, 100, 4e-6, 1e-6)
    if kernel is None:
        return [size]
    cause = ExpandCause.NO_KERNEL if kernel == EXPAND else None
    return [size, Lowered("lower", at, kernel, "int8", seconds, cause=cause)]


def report(*events: list[Event], facts: Facts = FACTS) -> Report:
    return Report(tuple(event for some in events for event in some), facts)


LEFT: list[Event] = [Left("lower", Place("q", "qfuse.quantize"), "because")]
BOTH = report(op("a", "fast"), op("b", "fast", line=2))


def test_a_report_is_not_worse_than_itself() -> None:
    found = diff_reports(BOTH, BOTH)

    assert found.regressions == ()
    assert (found.lost, found.gained, found.moved, found.removed, found.added) == ((),) * 5
    assert found.facts == {}
    assert str(found).startswith("not worse")


@pytest.mark.parametrize("slow", [None, EXPAND])
@pytest.mark.parametrize("node", ["b", "other"])
def test_an_op_that_lost_its_kernel_is_named_by_its_line(slow: str | None, node: str) -> None:
    """Also if the node has another name there."""
    after = report(op("a", "fast"), op(node, slow, line=2))
    found = diff_reports(BOTH, after)
    back = diff_reports(after, BOTH)

    assert [c.before.place.node for c in found.lost] == ["b"]
    assert found.regressions[0] == "1 op lost the kernel"
    assert "lost: fast -> float  model.py:2: y" in str(found)
    assert [c.after.place.node for c in back.gained] == ["b"]
    assert back.regressions == ()


def test_what_is_left_and_slower_is_worse() -> None:
    assert diff_reports(
        BOTH, report(op("a", "fast"), op("b", "fast", line=2), LEFT)
    ).regressions == ("1 more quantize or dequantize left",)
    slow = report(op("a", "fast"), op("b", "fast", 1.2e-6, line=2))
    assert diff_reports(BOTH, slow).regressions == ("predicted 1.10x slower (more than 1.05x)",)
    assert diff_reports(BOTH, slow, factor=1.2).regressions == ()
    assert diff_reports(slow, BOTH).regressions == ()


def test_predictions_for_two_machines_are_not_compared() -> None:
    other = replace(FACTS, target=replace(FACTS.target, threads=8))  # type: ignore[type-var]
    slow = report(op("a", "fast"), op("b", "fast", 9e-6, line=2), facts=other)
    found = diff_reports(BOTH, slow)

    assert found.regressions == ()
    assert found.facts["target"] == ("CPU, 1 thread, AVX512", "CPU, 8 threads, AVX512")
    assert "not compared" in str(found)


def test_facts_of_a_run_are_no_difference() -> None:
    later = replace(FACTS, created="2026-02-01T00:00:00Z", plan_seconds=3.0, torch_version="2.14.0")
    found = diff_reports(BOTH, replace(BOTH, facts=later))

    assert found.facts == {"torch": ("2.13.0", "2.14.0")}


def test_ops_that_only_one_report_has_are_listed() -> None:
    found = diff_reports(
        BOTH, report(op("a", "fast"), op("b", "fast", line=2), op("c", "x", line=3))
    )

    assert [run.place.node for run in found.added] == ["c"]
    assert diff_reports(BOTH, report(op("b", "other", line=2))).moved[0].after.kernel == "other"


def call(*args: object) -> Result:
    return CliRunner().invoke(main, ["diff", *map(str, args)])


@pytest.mark.own_kernels
def test_the_command_exits_by_the_outcome(tmp_path: Path) -> None:
    """Of a real model, and of the same one in which a rule is switched off."""
    target = Target.for_testing()
    good = qfuse.explain(Weighted(linear), activations(), target=target)
    bad = qfuse.explain(
        Weighted(linear), activations(), target=target, options={"without": ["fuse-linear"]}
    )
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(good.to_json())
    b.write_text(bad.to_json())

    assert call(a, a).exit_code == 0
    worse = call(a, b)
    assert worse.exit_code == 1, worse.output
    assert "lost: qfuse.linear_w8a8 -> float" in worse.output
    assert "models.py" in worse.output
    assert call(b, a).exit_code == 0
    data = json.loads(call(a, b, "--json").output)
    assert data["regressions"]
    assert data["lost"][0]["before"]["kernel"] == "qfuse.linear_w8a8"


@pytest.mark.parametrize(
    ("text", "says"), [(None, "cannot be read"), ("{}", "has no schema"), ("x", "not JSON")]
)
def test_bad_input_exits_with_2_and_names_the_file(
    tmp_path: Path, text: str | None, says: str
) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(BOTH.to_json())
    if text is not None:
        bad.write_text(text)
    for args in ((good, bad), (bad, good)):
        result = call(*args)
        assert result.exit_code == 2
        assert says in result.stderr
        assert "bad.json" in result.stderr
        assert "do:" in result.stderr
        assert "Traceback" not in result.output
