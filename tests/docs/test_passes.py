"""The page on passes runs, and shows what it says. ``make docs`` writes the outputs anew."""

from __future__ import annotations

import os
import re
from dataclasses import fields
from pathlib import Path

import pytest
from tests.docs.test_tour import WRITE_VARIABLE, rendered

from qfuse import passes
from qfuse.passes import GraphPass

PAGE = Path(__file__).parents[2] / "docs" / "passes.md"


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_the_page_shows_what_happens() -> None:
    page = PAGE.read_text(encoding="utf-8")
    made = rendered(page)
    if os.environ.get(WRITE_VARIABLE):
        PAGE.write_text(made, encoding="utf-8")
        page = made
    assert made == page
    assert page.count("```text\n```") == 0, "every output is shown"


def test_every_pass_and_option_is_explained() -> None:
    page = PAGE.read_text(encoding="utf-8")
    cells = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    kinds = {
        name
        for name in passes.__all__
        if isinstance(kind := getattr(passes, name), type)
        and issubclass(kind, GraphPass)
        and kind is not GraphPass
    }

    assert cells == kinds | {field.name for field in fields(GraphPass)}
