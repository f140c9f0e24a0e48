"""Compile times beside those of torch.compile: the figures are worked out right."""

from __future__ import annotations

import pytest
from tests.support.bench.results import SETTING

from qfuse.ir.errors import OptionsError
from qfuse_bench.experiments.compile_peers import (
    FROZEN,
    PLAIN,
    QFUSE,
    PeerOptions,
    rows_of,
    verdicts,
)
from qfuse_bench.harness.stats import median
from qfuse_bench.report.markdown import render

FOUND = {
    QFUSE: [
        {"seconds": 6.0, "cpu": 7.0, "steps": [1.0, 2.0, 3.0]},
        {"seconds": 8.0, "cpu": 9.0, "steps": [1.0, 3.0, 4.0]},
    ],
    PLAIN: [
        {"seconds": 10.0, "cpu": 12.0, "steps": []},
        {"seconds": 14.0, "cpu": 12.0, "steps": []},
    ],
    FROZEN: [
        {"seconds": 24.0, "cpu": 12.0, "steps": []},
        {"seconds": 24.0, "cpu": 12.0, "steps": []},
    ],
}


def test_a_row_has_medians_as_multiples_of_torch_compile() -> None:
    ours, plain, frozen = rows_of("bert", FOUND)

    assert ours.seconds == (6.0, 8.0)
    assert list(ours.steps) == pytest.approx([1.0, 2.5, 3.5])
    assert ours.versus == pytest.approx(7 / 12)
    assert plain.versus == pytest.approx(1.0)
    assert plain.steps == ()
    assert frozen.versus == pytest.approx(2.0)


def test_the_verdict_is_about_qfuse() -> None:
    text = "bert: qfuse takes 0.58 of the time of torch.compile; the aim is at most 1."
    assert verdicts(rows_of("bert", FOUND)) == [text]


def test_the_page_has_a_row_per_compiler() -> None:
    rows = rows_of("bert", FOUND)
    text = render("compile-peers", rows=rows, setting=SETTING, verdicts=["One."], median=median)

    assert "| bert | qfuse | 7.0 | 0.58 | 8.0 | 1.0 | 2.5 | 3.5 |" in text
    assert "| bert | torch.compile, frozen | 24.0 | 2.00 | 12.0 |" in text
    assert all(line.count("|") == 9 for line in text.splitlines() if line.startswith("| bert"))


@pytest.mark.parametrize("given", [{"models": ("gpt",)}, {"rounds": 0}, {"threads": -1}])
def test_what_cannot_be_measured_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(OptionsError):
        PeerOptions(**given)  # type: ignore[arg-type]
