"""The options of the command line that write a page, a trace or a profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from qfuse import session
from qfuse.capture import capture
from qfuse.cli import main

MODEL = "tests.test_cli_pages:model"
EAGER = ("--backend=eager", "--no-own-kernels")


def model() -> object:
    import torch  # noqa: PLC0415 - this function is what the command line calls

    from tests.support.graphs.reported_models import Blocks  # noqa: PLC0415

    return Blocks(1).eval(), (torch.randn(3, 16),)


def run(*args: str) -> Result:
    """Run the command line in this process."""
    return CliRunner().invoke(main, args)


@pytest.mark.export
def test_explain_writes_a_page_without_times(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = run("explain", MODEL, *EAGER, f"--html={page}")

    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert '"total":null' in text


def stages(report: Any) -> set[str]:
    return {event["stage"] for event in report["events"] if event["kind"] == "noted"}


def clipping() -> object:
    import torch  # noqa: PLC0415 - this function is what the command line calls
    from torch.nn.functional import linear  # noqa: PLC0415

    from tests.report.advice.models import Weighted, activations, static, weight  # noqa: PLC0415

    forward = lambda m, x: torch.relu(linear(static(x, 0.001), weight(m)))  # noqa: E731
    return Weighted(forward), activations()


@pytest.mark.export
@pytest.mark.parametrize("command", [("explain",), ("compile", *EAGER)], ids=lambda c: c[0])
def test_the_page_says_what_the_lint_finds(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures = 0

    def counted(*given: Any, **named: Any) -> Any:
        nonlocal captures
        captures += 1
        return capture(*given, **named)

    monkeypatch.setattr(session, "capture", counted)
    page, other, data = (tmp_path / name for name in ("page.html", "other.html", "data.json"))
    words = (*command, "tests.test_cli_pages:clipping")
    found = run(*words, f"--html={page}", f"--json={data}")
    needed = captures
    without = run(*words, f"--html={other}", "--no-lint")

    assert found.exit_code == without.exit_code == 0, found.output + without.output
    assert needed == 1
    assert "clipped-range: " in found.output
    assert "do: calibrate with inputs like these" in found.output
    assert "do: calibrate" not in without.output
    assert "calibrate with inputs like these" in page.read_text()
    assert "calibrate with inputs like these" not in other.read_text()
    assert "clipped-range" in {
        event.get("stage") for event in json.loads(data.read_text())["events"]
    }


@pytest.mark.export
def test_a_compilation_without_a_page_does_not_look_for_findings() -> None:
    result = run("compile", "tests.test_cli_pages:clipping", *EAGER)

    assert result.exit_code == 0, result.output
    assert "clipped-range" not in result.output


def without_a_kernel() -> object:
    import torch  # noqa: PLC0415 - this function is what the command line calls
    from torch.nn.functional import linear  # noqa: PLC0415

    from tests.report.advice.models import Weighted, activations, static, weight  # noqa: PLC0415

    forward = lambda m, x: torch.relu(linear(static(x), weight(m, axis=1)))  # noqa: E731
    return Weighted(forward), activations()


@pytest.mark.export
@pytest.mark.parametrize("command", [("explain",), ("compile", "--backend=eager")])
def test_strict_writes_the_report_before_it_fails(command: tuple[str, ...], tmp_path: Path) -> None:
    page, data = tmp_path / "page.html", tmp_path / "report.json"
    factory = "tests.test_cli_pages:without_a_kernel"
    result = run(*command, factory, "--strict", f"--html={page}", f"--json={data}")

    assert result.exit_code == 1
    assert "does not run on a quantized kernel" in result.output
    assert page.read_text().startswith("<!DOCTYPE html>")
    report = json.loads(data.read_text())
    assert report["actions"]
    # What the lint warns of too.
    assert "weight-axis" in stages(report)


@pytest.mark.export
def test_compile_writes_a_page_with_times_and_a_trace(tmp_path: Path) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    result = run("compile", MODEL, *EAGER, f"--html={page}", f"--trace={trace}", "--profile")

    assert result.exit_code == 0, result.output
    assert '"total":{' in page.read_text()
    assert len(json.loads(trace.read_text())["traceEvents"]) > 10
    assert "Microseconds per op" in result.stdout


@pytest.mark.export
def test_a_json_report_on_standard_output_stays_parsable() -> None:
    result = run("compile", MODEL, *EAGER, "--profile", "--json=-")

    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["events"]
    assert "Microseconds per op" in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("explain", "bert", "--html=no/such/folder/page.html"), "a folder that does not exist"),
        (("compile", "bert", "--html=."), "--html . is a folder"),
        (("compile", "bert", "--trace=."), "--trace . is a folder"),
        (("explain", "bert", "--trace=trace.json"), "No such option"),
        (("compile", "bert", "--save-plan=no/p.json"), "--save-plan no/p.json lies in a folder"),
        (("bisect", "bert", "--atol=1", "--save-plan=no/p"), "--save-plan no/p lies in a folder"),
        (("accuracy", "bert", "--json=."), "--json . is a folder"),
        (("accuracy", "bert", "--plot=no/p.svg"), "--plot no/p.svg lies in a folder"),
    ],
    ids=str,
)
def test_a_file_that_cannot_be_written_is_refused_first(
    args: tuple[str, ...], message: str
) -> None:
    result = run(*args)

    assert result.exit_code != 0
    assert message in result.stderr


@pytest.mark.parametrize("option", ["--html", "--trace", "--output", "--save-plan"])
def test_only_json_is_written_to_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("compile", MODEL, f"{option}=-")
    assert result.exit_code == 2
    assert f"{option} cannot write to standard output" in result.stderr
    assert "only --json can" in result.stderr
    assert list(tmp_path.iterdir()) == []
