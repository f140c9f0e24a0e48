"""Pages, docstrings and messages use the field's words, and pages name files that exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.test_links import ROOT

# What pages, docstrings and messages do not say, and what the field says.
WORDS = {
    r"rooms?\b": "stage",
    r"doorways?\b": "stage boundary",
    r"roads?\b": "entry point, pipeline, recipe",
    r"the floor\b": "the core",
    r"readers?\b": "user",
    r"others read\b": "has other users",
    r"stored numbers?\b": "quantized values",
    r"codes of\b": "quantized values",
    r"(some|no|every)body\b": "name who it is, or use the passive",
    r"(is|are) no (?!longer\b|wider\b)[a-z]+\b": "is not a",
    r"behind it\b": "after it",
}
_ALLOWED = re.compile(r"roads\.md|miss codes? of|there (is|are) no [a-z]+", re.IGNORECASE)
_PATH = re.compile(r"`((?:[\w-]+/)+(?:[\w-]+\.(?:py|md|toml|cpp|h|j2))?)`")
_FOLDERS = ("", "src", "src/qfuse", "benchmarks")


def written(root: Path) -> list[Path]:
    """The pages that people write, benchmarks' generated sections among them."""
    patterns = ("*.md", "docs/**/*.md", "examples/*/README.md")
    return sorted(page for pattern in patterns for page in root.glob(pattern))


def lines(root: Path) -> Iterator[tuple[Path, int, str]]:
    """Every line of a page, and of a docstring or another string in the sources."""
    for page in written(root):
        for number, line in enumerate(page.read_text("utf-8").splitlines(), start=1):
            yield page, number, line
    for source in sorted((root / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(source.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for number, line in enumerate(node.value.splitlines(), start=node.lineno):
                    yield source, number, line


def own_words(root: Path) -> list[str]:
    """``page:line: word`` of every word that the field has another one for."""
    return [
        f"{page.relative_to(root)}:{number}: {match[0]} ({better})"
        for page, number, line in lines(root)
        for word, better in WORDS.items()
        if (match := re.search(rf"\b{word}", _ALLOWED.sub("", line), re.IGNORECASE))
    ]


def missing_files(root: Path) -> list[str]:
    """``page: path`` of every file or folder that a page names and that does not exist."""
    return [
        f"{page.relative_to(root)}: {path}"
        for page in written(root)
        for path in _PATH.findall(page.read_text("utf-8"))
        if not any((root / folder / path).exists() for folder in _FOLDERS)
    ]


def test_pages_and_sources_use_the_words_of_the_field() -> None:
    assert own_words(ROOT) == []


def test_files_that_pages_name_exist() -> None:
    assert missing_files(ROOT) == []


def test_own_words_and_missing_files_are_found(tmp_path: Path) -> None:
    page = "Nobody is in the room.\nThere is no scale. It is no scale.\nSee `src/a.py`, `b/c.py`.\n"
    (tmp_path / "README.md").write_text(page)
    (tmp_path / "src").mkdir()
    source = '"""A module.\n\nIt has readers."""\n# A room.\nraise ValueError(f"{1} is no scale")\n'
    (tmp_path / "src" / "a.py").write_text(source)

    assert [line.partition(" (")[0] for line in own_words(tmp_path)] == [
        "README.md:1: room",
        "README.md:1: Nobody",
        "README.md:2: is no scale",
        "src/a.py:3: readers",
        "src/a.py:5: is no scale",
    ]
    assert missing_files(tmp_path) == ["README.md: b/c.py"]
