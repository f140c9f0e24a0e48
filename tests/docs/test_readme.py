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
# Predictions and errors are of the machine, and so are their units.
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?: (?:us|ms)\b)?")


def blocks(kind: str) -> list[str]:
    """The code blocks of one language."""
    return [body for found, body in _BLOCK.findall(PAGE.read_text("utf-8")) if found == kind]


def without_numbers(report: str) -> str:
    """A report of which only the words are left, without plurals that depend on numbers."""
    return _NUMBER.sub("#", report.strip()).replace("kernels", "kernel")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_code_runs_and_reports_what_the_page_shows() -> None:
    names: dict[str, Any] = {"__name__": "readme"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for body in blocks("python"):
            exec(compile(body, str(PAGE), "exec"), names)
    made = printed.getvalue().strip()
    (shown,) = blocks("text")
    if os.environ.get(WRITE_VARIABLE):
        page = PAGE.read_text("utf-8").replace(f"```text\n{shown}```", f"```text\n{made}\n```")
        PAGE.write_text(page, "utf-8")
        (shown,) = blocks("text")

    assert names["y"].shape == names["x"].shape
    # Which kernel wins is this machine's choice.
    if kernels.load().available:
        assert without_numbers(shown) == without_numbers(made)
        assert shown.startswith("2 of 5 products")


def test_figures_are_those_of_the_benchmarks() -> None:
    """Each row names a ratio with its interval, and two times, that one run has measured."""
    measured = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    figures = re.findall(
        r"\| ([\d.]+) ms \|[^|]*\| ([\d.]+) ms \| (.*?\])", PAGE.read_text("utf-8")
    )

    assert len(figures) == 5
    for ours, theirs, ratio in figures:
        assert f"| {ratio} | " in measured
        for time in (ours, theirs):
            assert re.search(rf"\| {re.escape(time)} [(|]", measured), time
    assert any(float(ratio.split()[0]) > 1 for *_, ratio in figures), "no miss is shown"
