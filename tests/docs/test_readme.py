"""README's code runs as it stands, and its figures are measured. ``make docs`` writes the report."""

import contextlib
import io
import os
import re
from typing import Any

import pytest
from tests.docs.test_links import ROOT
from tests.docs.test_tour import WRITE_VARIABLE

from qfuse import kernels

PAGE = ROOT / "README.md"
_BLOCK = re.compile(r"```(python|text)\n(.*?)```\n", re.DOTALL)
_ROWS = ("quantized ops", "left as they are", "values")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def blocks(kind: str) -> list[str]:
    """The code blocks of one language."""
    return [body for found, body in _BLOCK.findall(PAGE.read_text("utf-8")) if found == kind]


def excerpt(report: str) -> str:
    """The lines of a report that README shows: a summary, a quantized op, and what is not fused."""
    lines = [line.rstrip() for line in report.splitlines()]
    summary = [line for line in lines if line[2:].startswith(_ROWS)]
    norm = next((i for i, line in enumerate(lines) if "layer_norm: " in line), 0)
    missed = lines.index("Not fused")
    return "\n".join([*summary, "...", *lines[norm : norm + 2], "...", *lines[missed:]]).strip()


def rows(text: str) -> list[list[str]]:
    """Cells of the table rows behind the last gap, without the numbers."""
    cells = [line.strip("│").split("│") for line in text.rpartition("...")[2].splitlines()]
    return [[_NUMBER.sub("#", cell.strip()) for cell in row] for row in cells if len(row) > 1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_code_runs_and_reports_what_the_page_shows() -> None:
    names: dict[str, Any] = {"__name__": "readme"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for body in blocks("python"):
            exec(compile(body, str(PAGE), "exec"), names)
    made = excerpt(printed.getvalue())
    (shown,) = blocks("text")
    if os.environ.get(WRITE_VARIABLE):
        page = PAGE.read_text("utf-8").replace(f"```text\n{shown}```", f"```text\n{made}\n```")
        PAGE.write_text(page, "utf-8")
        (shown,) = blocks("text")

    assert names["y"].shape == names["x"].shape
    assert rows(shown) == rows(made)
    # Which kernel wins is this machine's choice.
    assert [line[2:18] for line in shown.splitlines()[:3]] == [name.ljust(16) for name in _ROWS]
    if kernels.load().available:
        assert "2 x qfuse.linear_w8a8" in made
        assert "2 x qfuse.linear_w8a8" in shown


def test_figures_are_those_of_the_benchmarks() -> None:
    """Each row names a ratio with its interval, and two times, that one run has measured."""
    measured = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    figures = re.findall(
        r"\| ([\d.]+) ms \|[^|]*\| ([\d.]+) ms \| (.*?\])", PAGE.read_text("utf-8")
    )

    assert len(figures) == 4
    for ours, theirs, ratio in figures:
        assert f"| {ratio} | " in measured
        assert f"| {ours} (" in measured
        assert f"| {theirs} (" in measured
    assert any(float(ratio.split()[0]) > 1 for *_, ratio in figures), "no miss is shown"
