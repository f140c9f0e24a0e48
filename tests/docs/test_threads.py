"""The recipe for streams runs, and prints what the page says. ``make docs`` writes it anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.docs.test_tour import WRITE_VARIABLE, rendered

PAGE = Path(__file__).parents[2] / "docs" / "threads.md"


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_the_page_shows_what_happens() -> None:
    page = PAGE.read_text(encoding="utf-8")
    made = rendered(page)
    if os.environ.get(WRITE_VARIABLE):
        PAGE.write_text(made, encoding="utf-8")
        page = made
    assert made == page
    assert "10 True" in page
