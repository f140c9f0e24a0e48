"""The page in a real browser: search, sort, selection in all stages, keys, and no script of others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.report.test_page import evil_report

from qfuse_bench.harness.browser import Browser, chromium
from qfuse_bench.workloads.report_pages import many_sites

pytestmark = [
    pytest.mark.skipif(chromium() is None, reason="there is no Chromium"),
    pytest.mark.slow,
]

ROWS = "document.querySelectorAll('#rows [data-row]')"
SELECTED = "document.querySelector('#rows [aria-selected=true]')"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened
        assert opened.errors == []


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    for count in (5, 5000):
        report, profile = many_sites(count)
        modules = {node.module for stage in report.stages for node in stage.nodes}
        sqnr = {"layers.0": 12.0, **dict.fromkeys(modules & {"layers.1"}, 40.0)}
        report.to_html(folder / f"{count}.html", profile=profile, sqnr=sqnr)
    report, _ = many_sites(5)
    report.to_html(folder / "explained.html")
    evil_report().to_html(folder / "evil.html")
    return folder


def lane(number: int, kind: str) -> str:
    """The names of the visible nodes of a stage that are marked so."""
    return (
        f"[...document.querySelectorAll('#lane-{number} .{kind}')].map(e => e.title.split(' ')[0])"
    )


def text(browser: Browser, selector: str) -> str:
    return str(browser.eval(f"document.querySelector({selector!r}).textContent"))


def test_nothing_but_the_file_is_asked_for(browser: Browser, pages: Path) -> None:
    for name in ("5.html", "explained.html", "5000.html"):
        browser.open(pages / name)
        assert browser.requests == [(pages / name).as_uri()]
    assert browser.errors == []


def test_only_visible_rows_are_in_the_document(browser: Browser, pages: Path) -> None:
    browser.open(pages / "5000.html")

    assert 0 < browser.eval(f"{ROWS}.length") < 60
    assert 0 < browser.eval("document.querySelectorAll('.lane [data-row]').length") < 300
    assert text(browser, "#count") == "5,000 of 5,000"


def test_the_last_row_can_be_seen(browser: Browser, pages: Path) -> None:
    browser.open(pages / "5000.html")
    browser.eval("document.getElementById('rows').scrollTop = 1e9")
    browser.frame()

    assert browser.eval(f"[...{ROWS}].at(-1).dataset.row") == "4999"


def test_search(browser: Browser, pages: Path) -> None:
    browser.open(pages / "5000.html")
    browser.press("/")
    browser.type("LAYER_1234 scale")

    assert text(browser, "#count") == "0 of 5,000"
    browser.press("Escape")
    assert text(browser, "#count") == "5,000 of 5,000"
    browser.type("number 1235 is")
    assert text(browser, "#count") == "1 of 5,000"
    assert "model.py:1235" in browser.eval(f"{ROWS}[0].textContent")


def test_columns_without_a_number_are_left_out(browser: Browser, pages: Path) -> None:
    names = "[...document.querySelectorAll('#head button')].map(e => e.textContent)"
    browser.open(pages / "5.html")
    assert browser.eval(names)[-2:] == ["predicted us", "measured us"]
    browser.open(pages / "explained.html")
    assert browser.eval(names)[-2:] == ["suggestion", "predicted us"]


def test_statuses_can_be_hidden(browser: Browser, pages: Path) -> None:
    browser.open(pages / "5000.html")
    browser.click("[data-status=kernel]")

    assert text(browser, "#count") == "3,000 of 5,000"
    assert browser.eval(f"[...{ROWS}].every(r => !r.classList.contains('kernel'))") is True


def test_sorting_by_a_number_puts_sites_without_one_last(browser: Browser, pages: Path) -> None:
    browser.open(pages / "5000.html")
    predicted = f"[...{ROWS}].map(r => r.children[6].textContent)"
    browser.click("#head > :nth-child(7) button")

    assert browser.eval(predicted)[:2] == ["50", "50"]
    browser.click("#head > :nth-child(7) button")
    assert browser.eval(predicted)[:2] == ["0.02", "0.03"]
    assert browser.eval("document.querySelector('#head > :nth-child(7)').ariaSort") == "ascending"


def test_a_row_selects_its_nodes_in_all_stages(browser: Browser, pages: Path) -> None:
    browser.open(pages / "5000.html")
    browser.press("/")
    browser.type("layer_3001(")
    browser.click("#rows [data-row='0']")

    # Three captured nodes are one, and each is part of three.
    assert browser.eval(lane(2, "selected")) == ["optimized_3001"]
    assert browser.eval(lane(0, "linked")) == [f"captured_{n}" for n in (3000, 3001, 3002)]
    assert browser.eval(lane(3, "linked")) == [f"lowered_{n}" for n in (3000, 3001, 3002)]
    assert "a_kernel: not here" in text(browser, "#details")
    assert "model.py:3001: y = self.layer_3001(x)" in text(browser, "#details")


def test_a_node_selects_its_row_and_the_other_stages(browser: Browser, pages: Path) -> None:
    browser.open(pages / "5.html")
    browser.click("#lane-0 [title^='captured_1 ']")

    assert browser.eval(lane(0, "selected")) == ["captured_1"]
    assert browser.eval(lane(2, "linked")) == ["optimized_0", "optimized_1", "optimized_2"]
    assert browser.eval(f"{SELECTED} !== null") is True
    assert "read by" in text(browser, "#details")


def test_leftovers_are_red(browser: Browser, pages: Path) -> None:
    browser.open(pages / "5.html")

    assert browser.eval(lane(2, "bad")) == ["optimized_0", "optimized_1"]
    assert browser.eval(lane(3, "bad")) == ["lowered_0", "lowered_1"]
    style = "getComputedStyle(document.querySelector('#lane-2 .bad')).color"
    assert browser.eval(style) == "rgb(180, 35, 24)"


def test_keys_move_the_selection(browser: Browser, pages: Path) -> None:
    browser.open(pages / "5000.html")
    browser.eval("document.getElementById('rows').focus()")
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowUp"):
        browser.press(key)

    assert browser.eval(f"{SELECTED}.dataset.row") == "1"
    assert (
        browser.eval("document.getElementById('rows').getAttribute('aria-activedescendant')")
        == "rows-1"
    )
    browser.eval("document.getElementById('lane-1').focus()")
    browser.press("ArrowRight")
    assert browser.eval("document.activeElement.id") == "lane-2"
    browser.press("Escape")
    assert browser.eval(f"{SELECTED} === null") is True


def test_a_lane_skips_the_names_of_modules(browser: Browser, pages: Path) -> None:
    browser.open(pages / "5.html")
    browser.eval("document.getElementById('lane-0').focus()")
    browser.press("ArrowDown")

    assert browser.eval(lane(0, "selected")) == ["captured_0"]


@pytest.mark.parametrize("overlay", ["us", "share", "bytes", "sqnr"])
def test_overlays_color_nodes(browser: Browser, pages: Path, overlay: str) -> None:
    browser.open(pages / "5000.html")
    browser.eval(
        f"(() => {{ const e = document.getElementById('overlay'); e.value = {overlay!r}; "
        "e.dispatchEvent(new Event('change')); })()"
    )

    assert browser.eval("document.querySelectorAll('#lane-3 .hot').length") > 0
    assert text(browser, "#legend") != ""


def test_overlays_without_data_are_not_offered(browser: Browser, pages: Path) -> None:
    browser.open(pages / "explained.html")
    names = browser.eval("[...document.querySelectorAll('#overlay option')].map(o => o.value)")

    assert names == ["none", "bytes"]


def test_the_timeline_and_the_memory_select_ops(browser: Browser, pages: Path) -> None:
    browser.open(pages / "5.html")
    browser.eval("document.getElementById('times').focus()")
    browser.press("ArrowRight")
    browser.press("ArrowRight")

    assert browser.eval(lane(3, "selected")) == ["lowered_1"]
    assert "measured 2 us" in text(browser, "#hover")
    browser.click("#bytes canvas")
    assert browser.eval(lane(3, "selected")) == ["lowered_2"]
    assert "need up to 1.4 kB" in text(browser, "#memory-text")


def test_things_to_do_lead_to_their_sites(browser: Browser, pages: Path) -> None:
    browser.open(pages / "5.html")
    browser.click(".todo")

    assert browser.eval(f"{SELECTED} !== null") is True


def test_names_of_a_model_are_shown_and_not_run(browser: Browser, pages: Path) -> None:
    browser.open(pages / "evil.html")
    browser.click("#rows [data-row='0']")

    assert browser.eval("document.querySelectorAll('img').length") == 0
    assert "alert(1)" in text(browser, "#details")
    assert browser.errors == []


def test_the_dark_page_has_other_colors(browser: Browser, pages: Path) -> None:
    browser.open(pages / "5.html")
    seen = []
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        seen.append(browser.eval("getComputedStyle(document.body).backgroundColor"))
    browser.prefer("light")

    assert seen == ["rgb(255, 255, 255)", "rgb(20, 24, 29)"]
