"""Builds the documentation as a site: ``make docs`` writes it to ``build/site``.

The source folder is the root of the repository, so that links between pages work both here and
where the files are shown as they are. No page holds anything that only Sphinx understands, but for
those of ``docs/api``: the navigation is added here.
"""

import sys
from pathlib import Path

from sphinx.application import Sphinx

# The site is about the sources beside it, whatever is installed.
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from qfuse import __version__

project = "qfuse"
author = "the authors of qfuse"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "examples/*/README.md"]

html_theme = "furo"
html_title = "qfuse"
html_copy_source = False
html_show_copyright = False
templates_path = ["_templates"]
html_additional_pages = {"index": "redirect.html"}

# Headings can be linked to, as they can where Markdown is shown.
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_use_ivar = True

# What a docstring refers to must be documented; the types in signatures need not be.
nitpicky = True
nitpick_ignore_regex = [("py:class", ".*"), ("py:data", r"typing\..*")]

_DECISIONS = sorted(f"docs/adr/{path.stem}" for path in Path(__file__).parent.glob("adr/0*.md"))
_NAVIGATION = {
    "Start": ["README", "docs/tour", "CHANGELOG"],
    "Guide": [
        "docs/report",
        "docs/page",
        "docs/lint",
        "docs/accuracy-per-layer",
        "docs/exactness",
        "docs/same-numbers",
        "docs/dialects",
        "docs/kernels",
        "docs/fusions",
        "docs/passes",
        "docs/entry-points",
        "docs/roads",
        "docs/saving",
        "docs/threads",
        "docs/plans",
        "docs/debugging",
        "docs/cli",
        "docs/benchmarks",
    ],
    "Reference": [
        "docs/api/compile",
        "docs/api/analysis",
        "docs/api/passes",
        "docs/api/inductor",
        "docs/api/rules",
        "docs/api/backends",
        "docs/api/testing",
    ],
    "Development": [
        "CONTRIBUTING",
        "docs/architecture",
        "docs/writing-a-rule",
        "docs/importing-an-op",
        "docs/adding-a-kernel",
        "docs/extending",
        "examples/simulator_dialect/README",
        "examples/integer_npu/README",
    ],
    "Decisions": [*_DECISIONS, "docs/adr/template"],
}


def _add_navigation(_app: Sphinx, name: str, source: list[str]) -> None:
    """Append a table of contents to the first page."""
    if name == root_doc:
        for caption, pages in _NAVIGATION.items():
            entries = "\n".join(f"/{page}" for page in pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"


def setup(app: Sphinx) -> None:
    """Connect to Sphinx."""
    app.connect("source-read", _add_navigation)
