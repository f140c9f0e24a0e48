"""Reads the source tree for the architecture tests, without importing it.

Every check here is a function from a package folder to a list of findings, so that a test can show
it a small wrong tree and see it fail.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "qfuse"
STAGES = ("capture", "normalize", "optimize", "lower", "backends")


@dataclass(frozen=True)
class Module:
    """One Python file of a package folder."""

    package: Path
    path: Path

    @property
    def name(self) -> str:
        """The path below the package, as the tables of the tests spell it."""
        return self.path.relative_to(self.package).as_posix()

    @property
    def parts(self) -> tuple[str, ...]:
        """Dotted path below the package; a package's own file is the path of the package."""
        parts = self.path.relative_to(self.package).with_suffix("").parts
        return parts[:-1] if parts[-1] == "__init__" else parts

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return parsed(self.path.read_text(), str(self.path))

    def at(self, node: ast.AST, what: str) -> str:
        """A finding, in the form that editors can jump to."""
        return f"{self.name}:{getattr(node, 'lineno', 1)}: {what}"


@cache
def parsed(text: str, name: str) -> ast.Module:
    """The syntax tree of a file, which many checks walk and none changes."""
    return ast.parse(text, filename=name)


def modules(package: Path) -> Iterator[Module]:
    """All Python files below ``package``, in a fixed order."""
    for path in sorted(package.rglob("*.py")):
        yield Module(package, path)


def write_tree(root: Path, files: dict[str, str]) -> Path:
    """Write a small source tree for a check to look at."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
