"""Every relative link of the documentation leads to a file, and every page is linked."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def pages(root: Path) -> list[Path]:
    """The pages of the repository: the top folder and ``docs/``."""
    return sorted([*root.glob("*.md"), *root.glob("docs/**/*.md")])


def links(page: Path) -> list[Path]:
    """Files that ``page`` links to, outside code blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    targets = [t for t in LINK.findall(text) if "://" not in t and not t.startswith("mailto:")]
    return [(page.parent / target).resolve() for target in targets]


def broken_links(root: Path) -> list[str]:
    """``page -> target`` of the links that lead nowhere."""
    return [
        f"{page.relative_to(root)} -> {target.name}"
        for page in pages(root)
        for target in links(page)
        if not target.exists()
    ]


def orphans(root: Path) -> list[str]:
    """Pages of ``docs/`` that cannot be reached from the README by following links."""
    reached, queue = set(), [(root / "README.md").resolve()]
    while queue:
        page = queue.pop()
        if page in reached or page.suffix != ".md" or not page.is_file():
            continue
        reached.add(page)
        queue += links(page)
    return [
        str(page.relative_to(root))
        for page in sorted(root.glob("docs/**/*.md"))
        if page.resolve() not in reached
    ]


def test_links_lead_somewhere() -> None:
    assert broken_links(ROOT) == []


def test_every_page_can_be_reached() -> None:
    assert orphans(ROOT) == []


def test_broken_links_and_orphans_are_found(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("[a](docs/a.md#top) [b](b.md) [c](https://example.org)")
    (tmp_path / "docs" / "a.md").write_text("```\n[x](no.md)\n```\n[up](../README.md)")
    (tmp_path / "docs" / "lost.md").write_text("")

    assert broken_links(tmp_path) == ["README.md -> b.md"]
    assert orphans(tmp_path) == ["docs/lost.md"]


def test_the_index_lists_every_decision_in_order() -> None:
    listed = [p.name for p in links(ROOT / "docs" / "index.md") if p.parent.name == "adr"]
    decisions = sorted(path.name for path in (ROOT / "docs" / "adr").glob("0*.md"))

    assert [name for name in listed if name.startswith("0")] == decisions
