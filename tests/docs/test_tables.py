"""Every table of the documentation is a table to those who render it."""

import re
from pathlib import Path

from tests.docs.test_links import ROOT, pages

_DELIMITER = re.compile(r"\|(?: *:?-+:? *\|)+")


def broken_tables(root: Path) -> list[str]:
    """``page:line`` of the first row of every table that has no header and delimiter."""
    found = []
    for page in pages(root):
        lines = ["", *page.read_text().splitlines(), ""]
        fenced = False
        for number, (before, line, after) in enumerate(
            zip(lines, lines[1:], lines[2:], strict=False), start=1
        ):
            fenced ^= line.startswith("```")
            starts = line.startswith("|") and not before.startswith("|")
            if starts and not fenced and not _DELIMITER.fullmatch(after):
                found.append(f"{page.relative_to(root)}:{number}")
    return found


def test_tables_are_whole() -> None:
    assert broken_tables(ROOT) == []


def test_a_row_behind_an_empty_line_is_found(tmp_path: Path) -> None:
    table = "| a | b |\n|---|--:|\n| 1 | 2 |\n"
    (tmp_path / "good.md").write_text(f"{table}\n```\n| x |\n```\n")
    (tmp_path / "bad.md").write_text(f"{table}\n| 3 | 4 |\n")

    assert broken_tables(tmp_path) == ["bad.md:5"]
