"""The page on rules is followed in a copy of the repository. ``make docs`` writes its outputs."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.architecture.test_rules_are_tested import untested
from tests.docs.test_links import ROOT
from tests.docs.test_tour import WRITE_VARIABLE

PAGE = ROOT / "docs" / "writing-a-rule.md"
_BLOCK = re.compile(r"```(python|text|diff)\n(.*?)```\n", re.DOTALL)
_FILE = re.compile(r"# ((?:src|tests)/\S+)\n")
# Runs what stands in a page as one program, and marks where the output of a part ends.
_RUN = "import sys; names = {'__name__': 'page'}\nfor part in sys.argv[1:]:\n"
_RUN += "    exec(open(part).read(), names)\n    print('\\0', end='')"


@dataclass
class Checkout:
    """A copy of the repository that a page is followed in."""

    root: Path
    scripts: int = 0

    @classmethod
    def copy(cls, to: Path) -> "Checkout":
        """Copy what rules and their tests need, with the bytecode of what is not changed."""
        for folder in ("src", "tests"):
            shutil.copytree(ROOT / folder, to / folder)
        shutil.copy(ROOT / "pyproject.toml", to)
        return cls(to)

    def write(self, block: str) -> bool:
        """Write a block that is a file; return whether it is one."""
        named = _FILE.match(block)
        if named is not None:
            path = self.root / named[1]
            assert not path.exists(), f"{path} is there already"
            path.write_text(block[named.end() :])
        return named is not None

    def patch(self, diff: str) -> None:
        """Insert the lines with a plus between the lines around them."""
        for name, body in re.findall(r"^--- (\S+)\n((?:[ +].*\n)+)", diff, re.MULTILINE):
            lines = body.splitlines(keepends=True)
            old = "".join(line[1:] for line in lines if line[0] == " ")
            text = (self.root / name).read_text()
            assert text.count(old) == 1, f"{name} has not once:\n{old}"
            new = "".join(line[1:] for line in lines)
            (self.root / name).write_text(text.replace(old, new))

    def python(self, *args: str) -> str:
        """Run Python on the copy; return what it prints."""
        path = os.pathsep.join((str(self.root / "src"), str(self.root)))
        done = subprocess.run(
            [sys.executable, *args],
            env={**os.environ, "PYTHONPATH": path},
            cwd=self.root, capture_output=True, text=True, check=False, timeout=280,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run(self, blocks: list[str]) -> list[str]:
        """Run blocks as one program; return what each prints."""
        parts = [self.root / f"part{self.scripts + i}.py" for i in range(len(blocks))]
        self.scripts += len(blocks)
        for part, block in zip(parts, blocks, strict=True):
            part.write_text(block)
        return self.python("-c", _RUN, *map(str, parts)).split("\0")[:-1]


def follow(page: str, checkout: Checkout) -> list[str]:
    """Do what the page says, in order; return what its programs print.

    A program that stands behind a change of the files starts anew, with those before it.
    """
    printed: list[str] = []
    programs: list[str] = []
    ran = 0
    for kind, block in _BLOCK.findall(page):
        if kind == "text":
            continue
        if kind == "python" and not _FILE.match(block):
            programs.append(block)
            continue
        if ran < len(programs):
            printed += checkout.run(programs)[ran:]
            ran = len(programs)
        if kind == "diff":
            checkout.patch(block)
        else:
            checkout.write(block)
    return printed + checkout.run(programs)[ran:]


@pytest.mark.slow
def test_who_follows_the_page_has_a_tested_rule(tmp_path: Path) -> None:
    page = PAGE.read_text("utf-8")
    checkout = Checkout.copy(tmp_path)
    printed = iter(follow(page, checkout))
    made = re.sub(
        r"```text\n.*?```\n", lambda _: f"```text\n{next(printed)}```\n", page, flags=re.DOTALL
    )
    if os.environ.get(WRITE_VARIABLE):
        PAGE.write_text(made, "utf-8")
        page = made

    assert made == page
    assert page.count("```text\n```") == 0, "every output is shown"
    lacking = untested(tmp_path / "src" / "qfuse", tmp_path / "tests")
    assert [line for line in lacking if "leaky_relu.py" in line] == []
    checkout.python("-m", "pytest", "-q", "tests/normalize/aten/activations/test_leaky_relu.py")
