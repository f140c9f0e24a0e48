"""The package of the page is written, installed in a folder of its own, used and tested."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.test_links import ROOT
from tests.docs.test_tour import WRITE_VARIABLE
from tests.kernels.test_wheel import needs_packaging

PAGE = ROOT / "docs" / "extending.md"
_BLOCK = re.compile(r"```(?:python|toml)\n(.*?)```\n", re.DOTALL)
_FILE = re.compile(r"# (\S+\.(?:py|toml))\n")


def written(page: str, to: Path) -> list[str]:
    """Write the blocks that are files; return the programs between them."""
    programs = []
    for block in _BLOCK.findall(page):
        named = _FILE.match(block)
        if named is None:
            programs.append(block)
            continue
        path = to / named[1]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block[named.end() :])
    return programs


def python(folder: Path, *args: str, path: tuple[Path, ...] = ()) -> str:
    """Run Python in a folder; return what it prints."""
    done = subprocess.run(
        [sys.executable, *args],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        },
        cwd=folder, capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.thorough
@pytest.mark.slow
@needs_packaging
def test_the_package_of_the_page_is_installed_used_and_tested(tmp_path: Path) -> None:
    page = PAGE.read_text("utf-8")
    (program,) = written(page, tmp_path / "acme")
    site = tmp_path / "site"
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--target", str(site))
    python(tmp_path / "acme", "-m", "pip", "install", *offline, ".")
    assert (site / "acme-1.0.dist-info" / "entry_points.txt").is_file()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    installed = (site, ROOT / "src")
    printed = python(elsewhere, "-c", program, path=installed)
    made = re.sub(r"```text\n.*?```\n", lambda _: f"```text\n{printed}```\n", page, flags=re.DOTALL)
    if os.environ.get(WRITE_VARIABLE):
        PAGE.write_text(made, "utf-8")
        page = made

    assert made == page
    tests = str(tmp_path / "acme" / "tests" / "test_acme.py")
    ran = python(elsewhere, "-m", "pytest", "-q", "--rootdir", ".", tests, path=installed)
    assert "4 passed" in ran
