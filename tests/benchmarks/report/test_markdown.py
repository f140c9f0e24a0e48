"""Generated sections of a page: only they change."""

from __future__ import annotations

import re
from pathlib import Path

import jinja2
import pytest
from tests.support.bench.results import results

from qfuse.ir.errors import OptionsError
from qfuse_bench.harness.machine_class import LIMITS, MachineClass, order_of
from qfuse_bench.report.markdown import (
    regions_of,
    render,
    replace_region,
    replace_section,
    write_section,
)

PAGE = """# Title
by hand
<!-- begin: models -->
old
<!-- end: models -->
<!-- begin: other -->
stays
<!-- end: other -->
"""


def test_a_section_is_replaced_and_nothing_else() -> None:
    text = replace_section(PAGE, "models", "new\n")

    assert text == PAGE.replace("old\n", "\nnew\n\n")
    assert replace_section(text, "models", "new") == text


@pytest.mark.parametrize(
    "text",
    [
        "nothing",
        "<!-- begin: models -->\n",
        "<!-- end: models -->\n<!-- begin: models -->\n",
        PAGE + PAGE,
    ],
)
def test_a_page_without_the_section_is_refused(text: str) -> None:
    with pytest.raises(OptionsError, match="no section 'models'"):
        replace_section(text, "models", "new")


ZEN4, ZEN3, XEON = map(MachineClass, ("avx512_vnni", "avx2", "amx"))
HELD = MachineClass("avx512_vnni", tuple(LIMITS["avx2"].items()))


def test_a_run_replaces_the_region_of_its_class_and_leaves_the_others() -> None:
    text = PAGE
    for kind in (ZEN3, HELD, ZEN4, XEON):
        text = replace_region(text, "models", kind, f"of {kind.name}\n")
    changed = replace_region(text, "models", ZEN4, "another")

    names = ["amx", "avx512_vnni", "avx2-forced-on-avx512_vnni", "avx2"]
    assert list(regions_of(text, "models")) == names, "the best machine first"
    assert [text.count(f"of {name}\n") for name in names] == [1] * 4
    assert "old" not in text, "what is of no class belongs to no machine"
    assert changed == text.replace("of avx512_vnni\n", "another\n")
    assert "**AVX2 (forced on a machine with AVX512-VNNI)**\n\nLimited by `QFUSE_ISA=avx2`" in text
    assert regions_of(changed, "models")["amx"] == "**AMX**\n\nof amx"
    assert replace_region(text, "models", ZEN3, "of avx2") == text
    head, tail = PAGE.split("old\n")
    assert text.startswith(head)
    assert text.endswith(tail)


def test_a_section_has_regions_of_its_own_name_only() -> None:
    text = replace_region(PAGE.replace("other", "models-too"), "models-too", ZEN4, "theirs")
    text = replace_region(text, "models", ZEN3, "ours")

    assert list(regions_of(text, "models")) == ["avx2"]
    assert list(regions_of(text, "models-too")) == ["avx512_vnni"]


@pytest.mark.parametrize(
    "inside",
    [
        "<!-- begin: models avx2 -->\nlost\n",
        "lost\n<!-- end: models avx2 -->\n",
        "<!-- begin: models avx2 -->\nlost\n<!-- end: models amx -->\n",
        "<!-- begin: models avx2 -->\na\n<!-- end: models avx2 -->\n" * 2,
        "<!-- begin: models avx2 -->\n<!-- begin: models amx -->\n<!-- end: models avx2 -->\n",
    ],
)
def test_broken_regions_are_refused_and_not_lost(inside: str) -> None:
    with pytest.raises(OptionsError, match="regions of section 'models' are broken"):
        replace_region(PAGE.replace("old\n", inside), "models", ZEN4, "new")


@pytest.mark.parametrize("page", sorted(Path("docs").glob("*.md")), ids=lambda page: page.name)
def test_the_tables_of_the_pages_are_of_known_classes(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for section in re.findall(r"^<!-- begin: ([\w-]+) -->$", text, re.MULTILINE):
        names = list(regions_of(text, section))
        known = {"amx", "avx512_vnni", "avx_vnni", "avx512", "avx2"}
        assert {name.partition("-forced-on-")[0] for name in names} <= known
        assert names == sorted(names, key=order_of)


def test_a_missing_page_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match="there is no page"):
        write_section(tmp_path / "none.md", "models", results=results())


def test_a_value_that_is_missing_is_an_error_and_not_a_gap() -> None:
    with pytest.raises(jinja2.UndefinedError):
        render("models")


def test_the_page_shows_what_was_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)

    write_section(page, "models", kind=HELD, results=results())
    text = page.read_text()

    assert "Some CPU (avx2), 2 cores, 2 threads" in text
    assert "qfuse 0.1, torch 2.13" in text
    assert "| all | 1 | 0.50 [0.50, 0.50] |" in text
    row = (
        "| toy | dynamic | f32 | 40.0 (40.0) | 20.0 (20.0) | 10.0 (10.0) "
        "| 0.50 [0.50, 0.50] | 30 / 31 |"
    )
    assert row in text
    # A wrong answer has no time anywhere, however fast it was.
    assert "| toy | dynamic | bf16 | 40.0 (40.0) | WRONG (1 dB) | failed | - | 1 / - |" in text
    assert "1.00 (1.00)" not in text
    assert "- toy, inductor bf16 w8a8-dynamic: WRONG, its answers are wrong" in text
    assert "- other: it did not start" in text
    assert "stays" in text
