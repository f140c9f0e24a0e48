"""What is compared with whom, and what counts."""

from __future__ import annotations

import io
import json
from dataclasses import replace

from rich.console import Console
from tests.support.bench.results import results

from qfuse_bench.harness.stats import Ratio
from qfuse_bench.peers.contenders import FloatType
from qfuse_bench.report.tables import show


def test_only_right_answers_are_compared() -> None:
    good, bad = results().pairs

    assert good.ratio == Ratio(0.5, 0.5, 0.5)
    assert good.speedup_over_float == Ratio(4.0, 4.0, 4.0)
    assert bad.ratio is None
    assert bad.speedup_over_float is None


def test_means_count_what_counts() -> None:
    found = results()

    assert [(name, ratio.value, n) for name, ratio, n in found.means()] == [
        ("all", 0.5, 1),
        ("dynamic", 0.5, 1),
        ("all at f32", 0.5, 1),
    ]
    assert found.mean(float_type=FloatType.BF16) == (None, 0)


def test_means_are_geometric() -> None:
    found = results()
    (match,) = found.matches
    good, bad = match.pairs
    slower = replace(good, ours=replace(good.ours, series=good.plain.series), recipe="static")
    found = replace(found, matches=(replace(match, pairs=(good, bad, slower)),))

    ratio, count = found.mean()

    assert count == 2
    assert ratio is not None
    assert abs(ratio.value - 1.0) < 1e-12  # 0.5 and 2
    assert [name for name, _, _ in found.means()] == ["all", "dynamic", "static", "all at f32"]


def test_everything_that_is_not_a_time_has_a_reason() -> None:
    assert results().trouble() == [
        "other: it did not start",
        "toy, inductor bf16 w8a8-dynamic: WRONG, its answers are wrong",
        "toy, qfuse bf16 w8a8-dynamic: failed, it fell over",
    ]


def test_the_terminal_shows_no_time_of_a_wrong_answer() -> None:
    out = io.StringIO()
    show(results(), Console(file=out, width=200))
    text = out.getvalue()

    assert "WRONG (1 dB)" in text
    assert "failed" in text
    assert "0.50 [0.50, 0.50]" in text
    assert "10.0 (10.0)" in text
    assert "1.00 (1.00)" not in text
    assert "100 (200)" in text


def test_json_holds_rounds_and_ratios() -> None:
    data = json.loads(json.dumps(results().to_dict()))

    (match,) = data["matches"]
    assert data["rounds"] == 15
    assert [p["ratio"] for p in match["pairs"]] == [{"value": 0.5, "low": 0.5, "high": 0.5}, None]
    ours = next(e for e in match["entries"] if e["name"] == "qfuse f32 w8a8-dynamic")
    assert ours["median"] == 0.01
    assert ours["series"]["rounds"] == [0.01] * 15
    assert ours["verdict"] == "ok"


def test_an_entry_that_was_not_timed_is_no_time() -> None:
    some = next(iter(results().matches[0].entries.values()))

    assert replace(some, series=None).time is None


def test_cells_that_lose_to_float_are_named() -> None:
    found = results()
    (match,) = found.matches
    assert match.losses() == []
    assert found.against_float == "none of 1 cells are slower than the float model"

    good, bad = match.pairs
    slow = replace(good, plain=good.ours, ours=replace(good.plain, name="qfuse f32"))
    lost = replace(found, matches=(replace(match, pairs=(slow, bad)),))
    (loss,) = lost.losses
    assert str(loss) == f"toy, dynamic: qfuse f32 takes 4.00 of {good.ours.name}"
    assert lost.against_float == "1 of 1 cells is slower than the float model"
    assert lost.to_dict()["losses_to_float"] == [str(loss)]
    # The float model without a compiler counts too.
    eager = next(name for name in match.entries if "eager" in name)
    entries = {**match.entries, eager: replace(good.ours, name=eager)}
    same = replace(match, entries=entries, eager=eager, pairs=(replace(good, ours=good.plain),))
    assert [str(one).rpartition(" of ")[2] for one in same.losses()] == [eager]
