"""The benchmark of more threads: what it compares, and what it leaves as it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from rich.console import Console

from qfuse.ir.errors import OptionsError
from qfuse_bench.harness.machine import Setting
from qfuse_bench.harness.measure import Series, Timeable
from qfuse_bench.kernels.contenders import OURS, Shape
from qfuse_bench.kernels.scaling import (
    Scaling,
    ScalingOptions,
    ScalingResults,
    numbers_of_threads,
    run_scaling,
)
from qfuse_bench.report.markdown import render

SHAPE = Shape(128, 64, 32)


def scaling() -> Scaling:
    times = {(1, OURS): 8e-6, (2, OURS): 5e-6, (1, "linear"): 8e-6, (2, "linear"): 4e-6}
    series = {key: Series([value] * 15, [value] * 15) for key, value in times.items()}
    return Scaling("w8a16", SHAPE, (1, 2), series)


@pytest.mark.parametrize(
    ("most", "expected"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (16, (1, 2, 4, 8, 16))]
)
def test_numbers_of_threads_double_up_to_the_most(most: int, expected: tuple[int, ...]) -> None:
    assert numbers_of_threads(most) == expected


def test_contenders_are_compared_with_as_many_threads() -> None:
    found = scaling()

    assert found.speedup(2) == pytest.approx(1.6)
    ratio = found.ratio(2, "linear")
    assert ratio is not None
    assert ratio.value == pytest.approx(1.25)


def test_page_has_a_row_per_number_of_threads() -> None:
    results = ScalingResults(Setting.here(2), 15, (scaling(),), 0.0)

    text = render("scaling", results=results)

    assert "| 128 x 64 x 32 | 1 | 8.00 | 1.00 | 1.00 [1.00, 1.00] |" in text
    assert "| 128 x 64 x 32 | 2 | 5.00 | 1.60 | 1.25 [1.25, 1.25] |" in text


@pytest.mark.parametrize(
    "wrong",
    [
        ScalingOptions(rows=("none",)),
        ScalingOptions(size=("64",)),
        ScalingOptions(family=("w9a9",)),
        ScalingOptions(rounds=1),
        ScalingOptions(most_threads=-1),
    ],
)
def test_wrong_options_are_refused(wrong: ScalingOptions) -> None:
    with pytest.raises(OptionsError):
        run_scaling(wrong, Console(quiet=True))


@pytest.mark.own_kernels
def test_a_run_writes_its_times_and_keeps_the_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def once(contenders: Mapping[str, Timeable], *_: object, **__: object) -> dict[str, Series]:
        # Two threads on a core that other tests use too take a slice of the scheduler per call.
        return {name: Series(found.time_block(1)) for name, found in contenders.items()}

    monkeypatch.setattr("qfuse_bench.kernels.scaling.measure", once)
    monkeypatch.setattr("qfuse_bench.kernels.scaling.copies_of", lambda *_: 2)
    before = torch.get_num_threads()
    target = tmp_path / "scaling.json"

    run_scaling(
        ScalingOptions(
            family=("w8a8",),
            rows=("1", "3"),
            size=("64x32",),
            most_threads=2,
            milliseconds=0.1,
            json=target,
        ),
        Console(quiet=True),
    )

    assert torch.get_num_threads() == before
    shapes = json.loads(target.read_text(encoding="utf-8"))["shapes"]
    assert [(s["m"], s["k"], s["n"]) for s in shapes] == [(1, 64, 32), (3, 64, 32)]
    measured = {(t["threads"], t["contender"]) for t in shapes[0]["times"]}
    assert measured == {(t, name) for t in (1, 2) for name in (OURS, "qlinear", "_int_mm")}
