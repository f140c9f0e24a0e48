"""Generated sections of a page: only they change."""

from __future__ import annotations

from pathlib import Path

import jinja2
import pytest
from tests.support.bench.results import results

from qfuse.ir.errors import OptionsError
from qfuse_bench.report.markdown import render, replace_section, write_section

PAGE = """# Title
by hand
<!-- begin: models -->
old
<!-- end: models -->
<!-- begin: other -->
stays
<!-- end: other -->
"""


def test_a_section_is_replaced_and_nothing_else() -> None:
    text = replace_section(PAGE, "models", "new\n")

    assert text == PAGE.replace("old\n", "\nnew\n\n")
    assert replace_section(text, "models", "new") == text


@pytest.mark.parametrize(
    "text",
    [
        "nothing",
        "<!-- begin: models -->\n",
        "<!-- end: models -->\n<!-- begin: models -->\n",
        PAGE + PAGE,
    ],
)
def test_a_page_without_the_section_is_refused(text: str) -> None:
    with pytest.raises(OptionsError, match="no section 'models'"):
        replace_section(text, "models", "new")


def test_a_missing_page_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match="there is no page"):
        write_section(tmp_path / "none.md", "models", results=results())


def test_a_value_that_is_missing_is_an_error_and_not_a_gap() -> None:
    with pytest.raises(jinja2.UndefinedError):
        render("models")


def test_the_page_shows_what_was_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)

    write_section(page, "models", results=results())
    text = page.read_text()

    assert "Some CPU (avx2), 2 cores, 2 threads" in text
    assert "qfuse 0.1, torch 2.13" in text
    assert "| all | 1 | 0.50 [0.50, 0.50] |" in text
    row = (
        "| toy | dynamic | f32 | 40.0 (40.0) | 20.0 (20.0) | 10.0 (10.0) "
        "| 0.50 [0.50, 0.50] | 30 / 31 |"
    )
    assert row in text
    # A wrong answer has no time anywhere, however fast it was.
    assert "| toy | dynamic | bf16 | 40.0 (40.0) | WRONG (1 dB) | failed | - | 1 / - |" in text
    assert "1.00 (1.00)" not in text
    assert "- toy, inductor bf16 w8a8-dynamic: WRONG, its answers are wrong" in text
    assert "- other: it did not start" in text
    assert "stays" in text
