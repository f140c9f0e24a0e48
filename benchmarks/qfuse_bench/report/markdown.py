"""Generated sections of Markdown pages.

A measured section holds one region per class of machine, see :class:`MachineClass`: a run replaces
that of its own class and leaves the others.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jinja2

from qfuse.ir.errors import OptionsError
from qfuse_bench.harness.machine_class import MachineClass, order_of
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


def replace_region(text: str, section: str, kind: MachineClass, body: str) -> str:
    """Return ``text`` with a section whose region of one class of machine is ``body``.

    Regions lie between the section's marks, between the lines ``<!-- begin: section class -->`` and
    ``<!-- end: section class -->``, the best machines first. A missing one is created; whatever
    lies outside of regions is dropped.

    Raises:
        OptionsError: The text has no such section, or a mark of a region is without its other half.
    """
    found = regions_of(text, section)
    head = "\n\n".join(filter(None, (f"**{kind.title}**", kind.note)))
    found[kind.name] = f"{head}\n\n{body.strip()}"
    regions = (
        f"<!-- begin: {section} {name} -->\n\n{found[name]}\n\n<!-- end: {section} {name} -->"
        for name in sorted(found, key=order_of)
    )
    return replace_section(text, section, "\n\n".join(regions))


def regions_of(text: str, section: str) -> dict[str, str]:
    """Return the content of a section's regions by the class of machine.

    Raises:
        OptionsError: The text has no such section, or a mark of a region is without its other half.
    """
    # Replacing finds the section, or says that there is none.
    before = replace_section(text, section, "").index(f"<!-- begin: {section} -->\n")
    inside = text[before:].partition(f"<!-- end: {section} -->\n")[0]
    name = rf"{re.escape(section)} (\S+)"
    whole = rf"^<!-- begin: {name} -->\n(.*?)^<!-- end: {re.escape(section)} \1 -->$"
    found = re.findall(whole, inside, re.MULTILINE | re.DOTALL)
    marks = re.findall(rf"^<!-- (?:begin|end): {name} -->$", inside, re.MULTILINE)
    names = [kind for kind, _ in found]
    if len(marks) != 2 * len(found) or len(set(names)) != len(names):
        raise OptionsError(
            f"the regions of section {section!r} are broken: {', '.join(marks)}",
            fix="each class has one line that begins it and one that ends it",
        )
    return {kind: content.strip() for kind, content in found}


def write_section(
    page: Path,
    section: str,
    template: str = "",
    *,
    kind: MachineClass | None = None,
    **values: Any,
) -> None:
    """Render the region of a class of machine from a template, by default the section's.

    Args:
        page: The page.
        section: Name of the section.
        template: Name of the template, if it is another.
        kind: The class of machine; by default that of this process.
        **values: What the template shows.

    Raises:
        OptionsError: The page is missing, or has no such section.
    """
    text, body = _read(page), render(template or section, **values)
    kind = kind or MachineClass.here()
    page.write_text(replace_region(text, section, kind, body), encoding="utf-8")


def check_section(page: Path, section: str) -> None:
    """Refuse a page that has no such section.

    Raises:
        OptionsError: The page is missing, or has no such section, or the marks in it are broken.
    """
    regions_of(_read(page), section)


def _read(page: Path) -> str:
    if not page.is_file():
        raise OptionsError(f"there is no page {page}", fix="give the path of an existing one")
    return page.read_text(encoding="utf-8")
