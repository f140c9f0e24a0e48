"""Generated sections of Markdown pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from qfuse.ir.errors import OptionsError
from qfuse_bench.report import format as words


def render(template: str, **values: Any) -> str:
    """Return the text of a template, ``templates/<template>.md.j2``."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("qfuse_bench"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # Markdown, not HTML
    )
    return environment.get_template(f"{template}.md.j2").render(words=words, **values)


def replace_section(text: str, section: str, body: str) -> str:
    """Return ``text`` with the content between the section's marks replaced by ``body``.

    The marks are the lines ``<!-- begin: section -->`` and ``<!-- end: section -->``.

    Raises:
        OptionsError: The text does not have these two lines, once and in this order.
    """
    begin, end = f"<!-- begin: {section} -->\n", f"<!-- end: {section} -->\n"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise OptionsError(
            f"the page has no section {section!r}",
            fix=f"put the lines {begin.strip()!r} and {end.strip()!r} where it belongs",
        )
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{body.strip()}\n\n{end}{rest.partition(end)[2]}"


def write_section(page: Path, section: str, template: str = "", **values: Any) -> None:
    """Render a section of a page from a template, by default the one of its name.

    Raises:
        OptionsError: The page is missing, or has no such section.
    """
    if not page.is_file():
        raise OptionsError(f"there is no page {page}", fix="give the path of an existing one")
    text = page.read_text(encoding="utf-8")
    page.write_text(
        replace_section(text, section, render(template or section, **values)), encoding="utf-8"
    )
