"""The page on importers is followed beside the checkout. ``make docs`` writes its output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.test_links import ROOT
from tests.docs.test_tour import WRITE_VARIABLE

PAGE = ROOT / "docs" / "importing-an-op.md"
_BLOCK = re.compile(r"```python\n(.*?)```\n", re.DOTALL)
_FILE = re.compile(r"# (\w+\.py)\n")


def written(page: str, to: Path) -> list[str]:
    """Write the blocks that are parts of files; return the programs between them."""
    programs = []
    for block in _BLOCK.findall(page):
        named = _FILE.match(block)
        if named is None:
            programs.append(block)
            continue
        with (to / named[1]).open("a") as file:
            file.write(block[named.end() :] + "\n\n")
    return programs


def python(folder: Path, *args: str) -> str:
    """Run Python beside the files; return what it prints."""
    path = os.pathsep.join((str(ROOT / "src"), str(folder)))
    done = subprocess.run(
        [sys.executable, *args],
        env={**os.environ, "PYTHONPATH": path},
        cwd=folder, capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.thorough
def test_who_follows_the_page_has_a_tested_importer(tmp_path: Path) -> None:
    page = PAGE.read_text("utf-8")
    (program,) = written(page, tmp_path)
    printed = python(tmp_path, "-c", program)
    made = re.sub(r"```text\n.*?```\n", lambda _: f"```text\n{printed}```\n", page, flags=re.DOTALL)
    if os.environ.get(WRITE_VARIABLE):
        PAGE.write_text(made, "utf-8")
        page = made

    assert made == page
    assert "qfuse.dequantize" in printed
    # Without the checkout: what a package needs for its tests is in qfuse.
    ran = python(tmp_path, "-m", "pytest", "-q", "--rootdir", ".", "test_mylib.py")
    assert "35 passed" in ran
