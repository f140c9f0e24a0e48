"""The kernels' benchmark: what is compared computes the same, and cells are counted right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from qfuse.ir.errors import OptionsError
from qfuse_bench.harness.machine import Setting
from qfuse_bench.harness.measure import Series
from qfuse_bench.kernels import cells as kernel_cells
from qfuse_bench.kernels import roofline
from qfuse_bench.kernels.cells import Cell, Stillness, cold_and_warm
from qfuse_bench.kernels.contenders import OURS, Arithmetic, Kind, Shape
from qfuse_bench.kernels.families import FAMILIES
from qfuse_bench.kernels.results import KernelResults
from qfuse_bench.kernels.roofline import Limits
from qfuse_bench.kernels.run import Grid, KernelOptions, run_kernels
from qfuse_bench.kernels.tables import limits_text, show_kernels
from qfuse_bench.kernels.targets import ROWS, SIDES, TARGETS, Target, Verdict, judge
from qfuse_bench.report.markdown import render

RATES = {Arithmetic.INT8: 1e12, Arithmetic.BF16: 3e11, Arithmetic.F32: 1e11}
LIMITS = Limits(32 << 20, 20e9, 100e9, RATES)


def answers(family: str, m: int = 5, k: int = 64) -> dict[str, torch.Tensor]:
    """What the contenders of a family give, each with every copy of its weight."""
    found = FAMILIES[family].prepare(k, 128, lambda _: 2)(m)
    for contender in found.values():
        assert contender.copies == 2
        assert torch.equal(contender.run(0), contender.run(1))
    return {name: contender.run(1) for name, contender in found.items()}


# The peers round: weights in bfloat16 after their scale.
@pytest.mark.parametrize(("name", "tolerance"), [("w8a16", 0.03), ("w8a32", 1e-5)])
@pytest.mark.own_kernels
def test_weight_only_contenders_agree(name: str, tolerance: float) -> None:
    found = answers(name)

    torch.testing.assert_close(found[OURS], found["linear"], atol=tolerance * 10, rtol=tolerance)


@pytest.mark.own_kernels
def test_int8_contenders_agree() -> None:
    found = answers("w8a8")

    torch.testing.assert_close(found[OURS], found["_int_mm"])
    assert found["qlinear"].shape == found[OURS].shape


@pytest.mark.parametrize("name", ["w8a8-static", "w8a8-bf16", "w8a8-codes", "w8a8-gelu"])
@pytest.mark.isa("vnni")  # Without it oneDNN saturates.
@pytest.mark.own_kernels
def test_static_contenders_agree(name: str) -> None:
    found = answers(name)
    ours, theirs = found[OURS], found["qlinear"]

    assert ours.dtype == theirs.dtype
    # Codes are whole numbers: one that lies on an edge may fall to either side.
    steps = 1.0 if ours.dtype == torch.uint8 else 0.0
    torch.testing.assert_close(ours.float(), theirs.float(), atol=steps + 1e-3, rtol=1e-2)


FOUR_BITS = [name for name in FAMILIES if name.startswith("w4")]


@pytest.mark.parametrize("name", FOUR_BITS)
@pytest.mark.own_kernels
def test_contenders_of_four_bits_agree(name: str) -> None:
    found = answers(name, k=256)
    theirs = found["linear bf16" if "linear bf16" in found else "linear"].float()
    error = (found[OURS].float() - theirs).square().mean()

    assert error < 1e-3 * theirs.square().mean()


@pytest.mark.own_kernels
def test_every_family_names_its_contenders() -> None:
    for name, family in FAMILIES.items():
        found = family.prepare(128, 128, lambda _: 1)(2)

        assert tuple(found) == tuple(family.kinds), name
        assert next(iter(found)) == OURS


def series(*seconds: float) -> Series:
    return Series(rounds=list(seconds), calls=list(seconds))


def cell(m: int, ours: float, theirs: float, *, cold: bool = True, spread: float = 0.0) -> Cell:
    """A cell of 15 rounds; in every other one ours takes that part longer."""
    mine = [ours * (1 + spread * (i % 2)) for i in range(15)]
    found = {OURS: series(*mine), "qlinear": series(*([theirs] * 15))}
    return Cell("w8a8", Shape(m, 1024, 1024), cold, found)


EACH = Target("w8a8", "qlinear", 1.1, (1, 4))
MEAN = replace(EACH, mean=True)


class TestJudge:
    def test_a_cell_counts_only_if_its_interval_excludes_the_bound(self) -> None:
        sure, unsure = cell(1, 1.0, 1.0), cell(4, 1.0, 1.0, spread=0.3)
        (cold, warm) = judge([sure, unsure], [EACH])

        assert (cold.verdict, cold.met, cold.missed, cold.of) == (Verdict.UNDECIDED, 1, 0, 2)
        assert judge([sure], [EACH])[0].verdict is Verdict.MET
        assert warm.verdict is Verdict.NOT_MEASURED

    def test_one_cell_above_misses(self) -> None:
        (cold, _) = judge([cell(1, 1.0, 1.0), cell(4, 1.2, 1.0)], [EACH])

        assert cold.verdict is Verdict.MISSED
        assert cold.worst is not None
        assert cold.worst.shape == Shape(4, 1024, 1024)
        assert "1 below, 1 above" in cold.reason(LIMITS)

    def test_nothing_that_counts_is_undecided(self) -> None:
        (cold, _) = judge([cell(1, 1.0, 1.0, spread=0.3)], [EACH])

        assert cold.verdict is Verdict.UNDECIDED

    def test_a_mean_is_that_of_all_cells(self) -> None:
        (met, _) = judge([cell(1, 0.5, 1.0), cell(4, 1.5, 1.0)], [MEAN])
        (missed, _) = judge([cell(1, 1.0, 1.0), cell(4, 1.5, 1.0)], [MEAN])

        assert met.verdict is Verdict.MET
        assert met.ratio is not None
        assert met.ratio.value == pytest.approx((0.5 * 1.5) ** 0.5)
        assert missed.verdict is Verdict.MISSED

    def test_cold_and_warm_are_judged_apart(self) -> None:
        cells = [cell(1, 1.0, 1.0), cell(1, 2.0, 1.0, cold=False)]

        assert [found.verdict for found in judge(cells, [EACH])] == [Verdict.MET, Verdict.MISSED]
        assert len(judge(cells, [replace(EACH, cold_only=True)])) == 1

    def test_rows_and_peers_of_others_do_not_count(self) -> None:
        other = replace(EACH, peer="_int_mm")
        judged = judge([cell(1, 1.0, 1.0), cell(512, 9.0, 1.0)], [EACH, other])

        assert [found.of for found in judged] == [1, 0, 0, 0]


def test_every_target_that_can_be_measured_names_a_peer() -> None:
    known = {(name, peer) for name, family in FAMILIES.items() for peer in family.peers}
    for target in TARGETS:
        if target.family in FAMILIES and target.peer != "memory":
            assert (target.family, target.peer) in known, target


class TestLimits:
    def test_the_roofline_is_bytes_or_operations(self) -> None:
        kind = Kind(Arithmetic.INT8, 8, 1)
        few, many = Shape(1, 4096, 4096), Shape(4096, 4096, 4096)

        assert LIMITS.seconds(kind, few, cold=True) == pytest.approx(
            (4096 * 4096 + 4096 + 4 * 4096) / 20e9
        )
        assert LIMITS.seconds(kind, few, cold=False) == pytest.approx(
            LIMITS.seconds(kind, few, cold=True) / 5
        )
        assert LIMITS.seconds(kind, many, cold=True) == pytest.approx(2 * 4096**3 / 1e12)

    def test_the_best_of_two_looks_counts(self) -> None:
        slower = Limits(32 << 20, 1e9, 2e11, {**RATES, Arithmetic.F32: 2e11})

        best = LIMITS.or_better(slower)

        assert (best.memory, best.cache) == (20e9, 2e11)
        assert best.rates == {**RATES, Arithmetic.F32: 2e11}

    def test_copies_are_twice_the_cache(self) -> None:
        assert LIMITS.copies(1 << 20) == 64
        assert LIMITS.copies((1 << 20) + 1) == 64
        assert LIMITS.copies(1 << 30) == 1

    def test_warm_cells_are_those_whose_weights_fit(self) -> None:
        family = FAMILIES["w8a32"]

        assert cold_and_warm(family, 1024, 1024, LIMITS) == (True, False)
        assert cold_and_warm(family, 11008, 1024, LIMITS) == (True,)


class TestGrid:
    def test_the_whole_grid(self) -> None:
        grid = Grid.of(KernelOptions())

        assert len(grid.sizes) == len(SIDES) ** 2
        assert grid.rows == ROWS
        assert set(grid.families) == {t.family for t in TARGETS if t.family in FAMILIES}

    def test_what_is_asked_for(self) -> None:
        options = KernelOptions(family=("w8a16",), rows=("3", "5"), size=("64x128",))

        assert Grid.of(options) == Grid(("w8a16",), (3, 5), ((64, 128),))
        assert Grid.of(options).count(LIMITS) == 4

    def test_quick_is_less_than_five_minutes(self) -> None:
        options = KernelOptions(quick=True)

        assert Grid.of(options).seconds(LIMITS, options) < 300
        assert Grid.of(KernelOptions()).seconds(LIMITS, KernelOptions()) > 300

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (KernelOptions(family=("w9",)), "unknown family 'w9'"),
            (KernelOptions(rows=("0",)), "'0' is not a number"),
            (KernelOptions(size=("12",)), "'12' is not a size"),
            (KernelOptions(size=("0x4",)), "'0x4' is not a size"),
            (KernelOptions(rounds=3), "3 rounds"),
        ],
    )
    def test_refuses(self, options: KernelOptions, message: str) -> None:
        with pytest.raises(OptionsError, match=message):
            run_kernels(options, Console(quiet=True))


@pytest.mark.parametrize(
    ("patience", "regions", "looks"),
    [(0.0, [9.0], 0), (1e-9, [9.0], 1), (60.0, [9.0, 0.0], 2)],
    ids=["no time", "time is up", "still at last"],
)
def test_stillness_looks_until_it_is_still_or_time_is_up(
    monkeypatch: pytest.MonkeyPatch, patience: float, regions: list[float], looks: int
) -> None:
    asked: list[float] = []

    def region(stillness: Stillness) -> float:
        del stillness
        asked.append(regions[min(len(asked) // kernel_cells._LOOKS, len(regions) - 1)])
        return asked[-1]

    monkeypatch.setattr(Stillness, "_region", region)
    monkeypatch.setattr(kernel_cells, "_PAUSE_SECONDS", 0.0)
    Stillness(patience).wait()

    assert len(asked) == looks * kernel_cells._LOOKS


class TestResults:
    def results(self) -> KernelResults:
        cells = (cell(1, 1e-4, 1e-4), cell(1, 1e-4, 1e-3, cold=False), cell(4, 1e-4, 1e-4))
        return KernelResults(Setting.here(1), ("portable",), LIMITS, 15, cells, 0.5)

    def test_a_shape_is_one_line(self) -> None:
        ((name, _, peers, lines),) = self.results().families()

        assert (name, peers) == ("w8a8", ("qlinear",))
        assert [line.shape.m for line in lines] == [1, 4]
        assert lines[0].warm is not None
        assert lines[1].warm is None

    def test_json_has_every_round(self) -> None:
        data = json.loads(json.dumps(self.results().to_dict()))

        assert len(data["cells"]) == 3
        assert len(data["cells"][0]["rounds"]["qlinear"]) == 15
        assert {found["verdict"] for found in data["targets"]} >= {"met", "not measured"}

    def test_page_and_terminal_show_the_same(self) -> None:
        results = self.results()
        console = Console(width=250)
        with console.capture() as shown:
            show_kernels(results, console)
        page = render("kernels", results=results, limits=limits_text(results.limits))

        for text in ("1 x 1024 x 1024", "1.00 [1.00, 1.00]", "0.10 [0.10, 0.10]", "53%"):
            assert text in page
            assert text in shown.get()


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.own_kernels
def test_a_run_writes_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_ROUNDS", 1)
    page = tmp_path / "page.md"
    page.write_text("<!-- begin: kernels -->\n<!-- end: kernels -->\n")
    # Small weights would need thousands of copies to be twice the cache.
    options = KernelOptions(
        family=("w8a8",), rows=("2",), size=("512x512",), milliseconds=0.1, threads=1, patience=0.0,
        json=tmp_path / "found.json", page=page,
    )  # fmt: skip
    before = torch.get_num_threads()

    results = run_kernels(options, Console(quiet=True))

    assert torch.get_num_threads() == before
    assert [(c.shape, c.cold) for c in results.cells] == [
        (Shape(2, 512, 512), True),
        (Shape(2, 512, 512), False),
    ]
    assert set(results.cells[0].series) == {OURS, "qlinear", "_int_mm", "memory"}
    assert results.limits.memory > 0
    assert "2 x 512 x 512" in page.read_text()
    assert json.loads((tmp_path / "found.json").read_text())["rounds"] == 15
