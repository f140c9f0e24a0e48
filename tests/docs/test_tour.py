"""The tour's code runs, and shows what the page says. ``make docs`` writes the outputs anew."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path
from typing import Any

TOUR = Path(__file__).parents[2] / "docs" / "tour.md"
WRITE_VARIABLE = "QFUSE_WRITE_DOCS"
_BLOCK = re.compile(r"```(?P<kind>python|text)\n(?P<body>.*?)```\n", re.DOTALL)


def rendered(page: str) -> str:
    """Return the page with every output replaced by what its code prints."""
    names: dict[str, Any] = {"__name__": "tour"}
    printed = ""

    def run(block: re.Match[str]) -> str:
        nonlocal printed
        if block["kind"] == "text":
            return f"```text\n{printed}```\n"
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(block["body"], str(TOUR), "exec"), names)
        printed = out.getvalue()
        return block[0]

    return _BLOCK.sub(run, page)


def test_the_tour_shows_what_happens() -> None:
    page = TOUR.read_text(encoding="utf-8")
    made = rendered(page)
    if os.environ.get(WRITE_VARIABLE):
        TOUR.write_text(made, encoding="utf-8")
        page = made
    assert made == page, (
        "QFUSE_WRITE_DOCS=1 pytest tests/docs/test_tour.py writes the page; read the diff"
    )


def test_the_tour_passes_all_five_stages() -> None:
    page = TOUR.read_text(encoding="utf-8")
    for call in ("capture(", "normalize(", "optimize(", "lower(", "qfuse.compile("):
        assert call in page
    assert page.count("```text\n```") == 0, "every output is shown"
