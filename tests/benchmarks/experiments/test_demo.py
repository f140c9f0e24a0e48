"""What the demo prints: tables of 80 columns, and one sentence at the end."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from qfuse_bench.experiments import demo
from qfuse_bench.harness.comparison import Entry, Verdict
from qfuse_bench.harness.measure import Series
from qfuse_bench.harness.memory import Memory
from qfuse_bench.harness.retrieval import Agreement

OURS = "qfuse f32 w8a8-dynamic"
EAGER = "eager f32"
INDUCTOR = "inductor f32 w8a8-dynamic"


def job(*, full: bool = False) -> Any:
    return demo._Job([], {"batch": 32, "seq": 57}, "w8a8-dynamic", None, 2, 15, 0.0, full)


def entry(name: str, ms: float) -> Entry:
    times = [ms / 1e3] * 15
    return Entry(
        name,
        Verdict.OK,
        series=Series(times, times),
        sqnr=23.0,
        memory=Memory(654000000, 713000000),
    )


def findings(*entries: Entry) -> Any:
    agreements = {OURS: Agreement(0.995, 0.981, 0.948)}
    return demo._Findings({e.name: e for e in entries}, agreements, None, 0.0)


def test_the_last_sentence_names_what_is_faster_and_what_is_slower() -> None:
    found = findings(entry(EAGER, 90.0), entry(OURS, 30.0), entry(INDUCTOR, 24.0))

    assert demo._summary(found, job(), 384) == (
        "int8 MiniLM takes 30.0 ms under qfuse: 3.00 times as fast as float f32: eager (90.0 ms); "
        "1.25 times the time of int8 f32: torch.compile + torchao (24.0 ms), and 95% of "
        "384 sentences keep their nearest one."
    )


def test_wrong_answers_have_no_time_in_it() -> None:
    wrong = Entry(OURS, Verdict.WRONG, "its answers are wrong: 3.0 dB, and 10.0 expected")
    found = findings(entry(EAGER, 90.0), wrong)

    assert demo._summary(found, job(), 384) == (
        "qfuse has no valid time here: WRONG, its answers are wrong: 3.0 dB, and 10.0 expected."
    )


def test_one_that_failed_is_left_out_of_it() -> None:
    failed = Entry(INDUCTOR, Verdict.FAILED, "it crashed")
    found = findings(entry(EAGER, 90.0), entry(OURS, 30.0), failed)

    assert "torchao" not in demo._summary(found, job(), 384)


@pytest.mark.parametrize("full", [False, True])
def test_tables_have_80_columns(full: bool) -> None:
    names = [c.name for c in (*demo._first(job(full=full)), *demo._rest(job(full=full)))]
    found = findings(*(entry(name, 1234.5 + i) for i, name in enumerate(names)))
    # Wide enough not to fold: what is printed is as wide as the table wants to be.
    output = StringIO()
    console = Console(file=output, width=200)
    console.print(demo._times(found, job(full=full)))
    console.print(demo._answers(found))

    lines = output.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("qfuse" in line for line in lines) >= 2


def test_the_first_figures_come_from_qfuse_and_the_float_model() -> None:
    assert [c.name for c in demo._first(job())] == [EAGER, OURS]
    assert [c.name for c in demo._rest(job())] == ["inductor f32", INDUCTOR]


def test_the_full_demo_adds_bfloat16_and_int8_without_a_compiler() -> None:
    rest = demo._rest(job(full=True))

    assert [c.name for c in rest] == [
        "eager f32 w8a8-dynamic",
        "inductor f32",
        "inductor bf16",
        INDUCTOR,
        "inductor bf16 w8a8-dynamic",
        "qfuse bf16 w8a8-dynamic",
    ]
    assert [c.timed for c in rest] == [False, True, True, True, True, True]
