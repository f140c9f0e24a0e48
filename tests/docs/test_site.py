"""The documentation builds as a site: links lead somewhere, and every public name has its entry."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.test_links import ROOT

import qfuse
from qfuse import passes

sphinx = pytest.importorskip("sphinx", reason="needs the extra docs")
pytest.importorskip("furo", reason="needs the extra docs")
pytest.importorskip("myst_parser", reason="needs the extra docs")

pytestmark = pytest.mark.slow


def build(root: Path, to: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a checkout as ``make docs`` does."""
    return subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html",
         "-c", str(root / "docs"), "-d", str(to / "doctrees"), str(root), str(to / "site")],
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip


@pytest.mark.thorough
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    from sphinx.util.inventory import InventoryFile  # noqa: PLC0415 - not everywhere

    built = build(ROOT, tmp_path)
    assert built.returncode == 0, built.stderr

    inventory = InventoryFile.loads((tmp_path / "site" / "objects.inv").read_bytes(), uri="")
    entries = {name for kind in inventory.data.values() for name in kind}
    public = {f"qfuse.{name}" for name in qfuse.__all__} - {"qfuse.__version__"}
    public |= {f"qfuse.passes.{name}" for name in passes.__all__}
    assert public - entries == set()
    assert "url=docs/index.html" in (tmp_path / "site" / "index.html").read_text()


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Page\n\n[here](#page) [gone](gone.md)\n")
    conf = 'extensions = ["myst_parser"]\nroot_doc = "docs/index"\ninclude_patterns = ["docs/*"]\n'
    (tmp_path / "docs" / "conf.py").write_text(conf)
    built = build(tmp_path, tmp_path)

    assert built.returncode != 0
    assert "gone.md" in built.stderr
