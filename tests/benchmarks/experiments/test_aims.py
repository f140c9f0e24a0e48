"""What all cells together have to reach follows from the cells, by the class of machine."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.support.bench.results import SETTING, entry

from qfuse_bench.experiments import goals
from qfuse_bench.experiments.aims import AIMS, AimFinding, reached
from qfuse_bench.experiments.goal_results import CellResult, GoalResults
from qfuse_bench.experiments.goals import CELLS, Cell, Outcome
from qfuse_bench.harness.comparison import Entry, Verdict
from qfuse_bench.harness.machine_class import LIMITS, MachineClass
from qfuse_bench.harness.measure import Series
from qfuse_bench.peers.cases import CASES
from qfuse_bench.peers.contenders import Engine, FloatType
from qfuse_bench.report.markdown import render

VNNI = MachineClass("avx512_vnni")
HELD = MachineClass("avx512_vnni", tuple(LIMITS["avx2"].items()))
BERT = [c for c in CELLS if c.case == "bert" and c.ours.float_type is FloatType.F32]
STATIC, DYNAMIC, W4A8, WEIGHT_ONLY, W4A16 = BERT
(DECODE, _) = (c for c in CELLS if c.recipe == goals.ANY_BITS)
OURS = 0.01


def entries(cell: Cell, times: dict[str, float], **changes: object) -> dict[str, Entry]:
    """Everybody in a cell; rivals of a bar take so long as is said of it, others as we do."""
    case = CASES[cell.case]
    found = {cell.ours.on(case).name: entry(cell.ours.on(case), OURS, 30.0)}
    for bar in cell.bars:
        for way in bar.rivals:
            made = entry(way.on(case), times.get(bar.name, OURS), 30.0)
            found[made.name] = replace(made, **changes) if bar.name in times else made  # type: ignore[arg-type]
    return found


def judged(
    *measured: tuple[Cell, dict[str, Entry]],
    kind: MachineClass = VNNI,
    unlimited: frozenset[Engine] = frozenset(),
) -> dict[str, AimFinding]:
    return {f.aim.name: f for f in reached(measured, kind, unlimited, CELLS)}


def test_a_mean_is_judged_by_its_interval() -> None:
    name = "all recipes / Inductor + torchao"
    fast = (STATIC, entries(STATIC, {goals.INDUCTOR: OURS / 0.5}))
    slow = (DYNAMIC, entries(DYNAMIC, {goals.INDUCTOR: OURS / 1.0}))
    found = judged(fast, slow)[name]

    assert found.ratio is not None
    assert found.ratio.value == pytest.approx(0.5**0.5)
    assert (found.outcome, found.count, found.of) == (Outcome.MET, 2, 60)
    assert found.worst == "bert: qfuse f32 w8a8-dynamic / inductor f32 w8a8-dynamic, 1.00"
    assert judged(slow)[name].outcome is Outcome.MISSED
    noisy = entries(STATIC, {goals.INDUCTOR: 0.0}, series=Series([0.012, 0.016] * 7 + [0.0135]))
    assert judged((STATIC, noisy))[name].outcome is Outcome.UNDECIDED


def test_each_cell_counts_where_one_is_enough_to_miss() -> None:
    name = "no cell slower than a rival that is right"
    good = (STATIC, entries(STATIC, {}))
    bad = (DYNAMIC, entries(DYNAMIC, {goals.OPENVINO: OURS / 1.1}))

    assert judged(good)[name].outcome is Outcome.MET
    found = judged(good, bad)[name]
    assert (found.outcome, found.count) == (Outcome.MISSED, 6)
    assert found.worst.endswith("/ openvino f32 w8a8-dynamic, 1.10")
    wrong = (DYNAMIC, entries(DYNAMIC, {goals.OPENVINO: OURS / 1.1}, verdict=Verdict.WRONG))
    assert judged(good, wrong)[name].outcome is Outcome.MET


def test_one_token_is_measured_by_the_fastest_recipe() -> None:
    name = "one token / the best int8 or int4 recipe"
    found = entries(DECODE, {goals.BEST_RECIPE: OURS / 0.4})
    assert judged((DECODE, found))[name].outcome is Outcome.MET

    case = CASES[DECODE.case]
    fastest = DECODE.bars[0].rivals[3].on(case)
    found[fastest.name] = entry(fastest, OURS / 0.6, 30.0)
    missed = judged((DECODE, found))[name]
    assert (missed.outcome, missed.of) == (Outcome.MISSED, 2)
    assert fastest.name in missed.worst


def test_without_vnni_rivals_count_whose_sums_saturate_and_that_is_said() -> None:
    name = f"prompts without VNNI / {goals.INDUCTOR}, right or wrong"
    wrong = entries(STATIC, {goals.INDUCTOR: OURS / 0.9}, verdict=Verdict.WRONG)
    found = judged((STATIC, wrong), kind=HELD)

    assert (found[name].outcome, found[name].count, found[name].wrong) == (Outcome.MET, 1, 1)
    assert found[name].text.endswith("1 of the rivals give wrong answers")
    failed = entries(STATIC, {goals.INDUCTOR: OURS}, verdict=Verdict.FAILED)
    assert judged((STATIC, failed), kind=HELD)[name].outcome is Outcome.NOT_MEASURED


def test_float_products_of_prompts_are_no_aim_without_vnni() -> None:
    name = "prompts without VNNI / float Inductor"
    cells = [(cell, entries(cell, {goals.FLOAT: OURS / 0.6})) for cell in BERT]
    found = judged(*cells, kind=HELD)[name]

    assert (found.outcome, found.count) == (Outcome.MET, 3)
    assert found.of == 5 * 2 * 3, "five models, two float types, three recipes"


def test_the_class_of_machine_decides_what_is_aimed_at() -> None:
    whole, held = (set(judged(kind=kind)) for kind in (VNNI, HELD))

    assert {a.name for a in AIMS if a.vnni is None} == whole & held
    assert not any("without VNNI" in name for name in whole)
    assert judged(kind=MachineClass("amx")).keys() == whole
    assert judged(kind=MachineClass("avx2")).keys() == held
    assert judged(kind=MachineClass("avx512")).keys() == held


def test_an_engine_without_a_switch_does_not_count_under_limits() -> None:
    name = f"prompts without VNNI / {goals.ONNX_RUNTIME}, right or wrong"
    measured = (STATIC, entries(STATIC, {}))
    only = frozenset((Engine.ONNX_RUNTIME,))

    assert judged(measured, kind=HELD)[name].count == 1
    found = judged(measured, kind=HELD, unlimited=only)
    assert (found[name].count, found[name].of) == (0, 0)
    assert found["no cell slower than a rival that is right"].count == 2


def test_without_our_time_nothing_is_reached() -> None:
    measured = entries(STATIC, {})
    name = STATIC.ours.on(CASES["bert"]).name
    measured[name] = replace(measured[name], verdict=Verdict.FAILED)

    assert {f.outcome for f in judged((STATIC, measured)).values()} == {Outcome.NOT_MEASURED}


def test_page_and_file_show_the_aims() -> None:
    cell = CellResult(STATIC, entries(STATIC, {goals.INDUCTOR: OURS / 0.5}), 0.0)
    broken = CellResult(DYNAMIC, {}, 0.0, "it fell over")
    results = GoalResults(SETTING, 15, (cell, broken), {}, VNNI, AIMS, CELLS)
    text = render("goals", results=results)

    row = "| all recipes / Inductor + torchao | 0.75 | geometric mean | 0.50 [0.50, 0.50] | met |"
    assert f"{row} 1 of 60 comparisons; worst: bert: qfuse f32 w8a8-static" in text
    assert "| one token / the best int8 or int4 recipe | 0.50 | each | - | not measured |" in text
    data = json.loads(json.dumps(results.to_dict()))
    assert data["class"] == "avx512_vnni"
    assert data["aims"][0]["outcome"] == "met"
