"""What all cells of the goals together have to reach, by the class of machine.

An aim of a geometric mean is met if the whole 95 % interval is at most the bound, and missed if the
whole interval is above. One of each cell is met if that holds for every cell, and missed if one is
surely above.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from qfuse_bench.experiments import goals
from qfuse_bench.experiments.goals import Bar, Cell, Outcome, Way, outcome_of
from qfuse_bench.harness.comparison import Entry, Verdict
from qfuse_bench.harness.machine_class import MachineClass
from qfuse_bench.harness.measure import Series, compare
from qfuse_bench.harness.stats import Ratio, mean_ratio
from qfuse_bench.peers.cases import CASES
from qfuse_bench.peers.contenders import Engine

_INT8_RECIPES = frozenset(("static", "dynamic", "w4a8"))
_RIVALS = (goals.INDUCTOR, goals.OPENVINO, goals.ONNX_RUNTIME)
Entries = Mapping[str, Entry]
"""The contenders of a cell by name."""


@dataclass(frozen=True, slots=True)
class Aim:
    """One aim.

    Attributes:
        name: The name in tables.
        most: The ratio of times that is allowed.
        bars: Names of the bars whose rivals count.
        mean: Whether it is about the geometric mean; if not, about each cell.
        vnni: Whether it is for machines with int8 dot products, or for those without; ``None`` for
            both.
        about: Whether a cell counts.
        even_wrong: Whether rivals count whose answers are wrong, as those of saturating sums are.
    """

    name: str
    most: float
    bars: tuple[str, ...]
    mean: bool = True
    vnni: bool | None = None
    about: Callable[[Cell], bool] = lambda _: True
    even_wrong: bool = False

    def holds_on(self, kind: MachineClass) -> bool:
        """Whether it is an aim for a class of machine."""
        return self.vnni is None or self.vnni is kind.has_vnni


@dataclass(frozen=True, slots=True)
class AimFinding:
    """The outcome of an aim.

    Attributes:
        aim: The aim.
        outcome: Whether it is reached.
        count: How many comparisons there are.
        of: How many there would be, if every cell and engine were measured.
        ratio: The geometric mean, or the ratio of the worst cell.
        worst: The worst comparison.
        wrong: How many of the rivals have wrong answers.
    """

    aim: Aim
    outcome: Outcome
    count: int
    of: int
    ratio: Ratio | None = None
    worst: str = ""
    wrong: int = 0

    @property
    def text(self) -> str:
        """What the outcome is made of."""
        parts = [f"{self.count} of {self.of} comparisons"]
        if self.worst:
            parts.append(f"worst: {self.worst}")
        if self.wrong:
            parts.append(f"{self.wrong} of the rivals give wrong answers")
        return "; ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "aim": self.aim.name,
            "most": self.aim.most,
            "outcome": self.outcome,
            "count": self.count,
            "of": self.of,
            "ratio": None if self.ratio is None else asdict(self.ratio),
            "worst": self.worst,
            "wrong": self.wrong,
        }


def _is_prompt(cell: Cell) -> bool:
    return cell.case != goals.DECODE


def _has_int8_prompt(cell: Cell) -> bool:
    return _is_prompt(cell) and cell.recipe in _INT8_RECIPES


def _saturating(rival: str) -> Aim:
    name = f"prompts without VNNI / {rival}, right or wrong"
    return Aim(name, 1.0, (rival,), vnni=False, about=_has_int8_prompt, even_wrong=True)


AIMS: tuple[Aim, ...] = (
    Aim("all recipes / Inductor + torchao", 0.75, (goals.INDUCTOR,), vnni=True),
    Aim("equal bits / OpenVINO", 0.9, (goals.OPENVINO,), vnni=True),
    Aim("equal bits / ONNX Runtime", 0.9, (goals.ONNX_RUNTIME,), vnni=True),
    Aim(
        "prompts without VNNI / float Inductor",
        0.65,
        (goals.FLOAT,),
        vnni=False,
        about=_has_int8_prompt,
    ),
    *map(_saturating, _RIVALS),
    Aim("one token / the best int8 or int4 recipe", 0.5, (goals.BEST_RECIPE,), mean=False),
    Aim("no cell slower than a rival that is right", 1.05, _RIVALS, mean=False),
    Aim("no cell slower than the float model", 1.0, (goals.FLOAT,), mean=False),
)
"""The aims of the cells of :data:`qfuse_bench.experiments.goals.CELLS`."""


@dataclass(frozen=True, slots=True)
class _Comparison:
    title: str
    ours: Series
    theirs: Series
    wrong: bool


def reached(
    measured: Sequence[tuple[Cell, Entries]],
    kind: MachineClass,
    unlimited: frozenset[Engine],
    whole: Sequence[Cell],
    aims: Sequence[Aim] = AIMS,
) -> list[AimFinding]:
    """Judge the aims of a class of machine by what was measured.

    Args:
        measured: Cells with their entries.
        kind: The class of machine.
        unlimited: Engines that used more instruction sets than the others; they do not count.
        whole: All cells that there are.
        aims: What to judge.
    """
    return [
        _judge(aim, measured, unlimited, sum(len(_bars(aim, cell, unlimited)) for cell in whole))
        for aim in aims
        if aim.holds_on(kind)
    ]


def _judge(
    aim: Aim, measured: Sequence[tuple[Cell, Entries]], unlimited: frozenset[Engine], of: int
) -> AimFinding:
    found = [
        one
        for cell, entries in measured
        for bar in _bars(aim, cell, unlimited)
        if (one := _best(aim, cell, bar, entries, unlimited)) is not None
    ]
    ratios = {one.title: compare(one.ours, one.theirs) for one in found}
    known = {title: ratio for title, ratio in ratios.items() if ratio is not None}
    if not known:
        return AimFinding(aim, Outcome.NOT_MEASURED, 0, of)
    worst = max(known, key=lambda title: known[title].value)
    ratio, judged = known[worst], list(known.values())
    if aim.mean:
        mean = mean_ratio([(one.ours.rounds, one.theirs.rounds) for one in found])
        assert mean is not None, "there are comparisons"
        ratio, judged = mean, [mean]
    wrong = sum(one.wrong for one in found)
    shown = f"{worst}, {known[worst].value:.2f}"
    return AimFinding(aim, outcome_of(aim.most, judged), len(found), of, ratio, shown, wrong)


def _bars(aim: Aim, cell: Cell, unlimited: frozenset[Engine]) -> list[Bar]:
    """Return the bars of a cell that count, if they have a rival under the same limits."""
    if not aim.about(cell):
        return []
    return [bar for bar in cell.bars if bar.name in aim.bars and _equal(bar, unlimited)]


def _equal(bar: Bar, unlimited: frozenset[Engine]) -> list[Way]:
    return [way for way in bar.rivals if way.engine not in unlimited]


def _best(
    aim: Aim, cell: Cell, bar: Bar, entries: Entries, unlimited: frozenset[Engine]
) -> _Comparison | None:
    """Compare with the fastest rival of a bar."""
    case = CASES[cell.case]
    ours = entries[cell.ours.on(case).name].time
    if ours is None:
        return None
    names = [way.on(case).name for way in _equal(bar, unlimited)]
    rivals = [entries[name] for name in names if name in entries]
    timed = [
        (series, rival)
        for rival in rivals
        if (series := _time(rival, even_wrong=aim.even_wrong)) is not None
    ]
    if not timed:
        return None
    series, rival = min(timed, key=lambda one: one[0].median)
    title = f"{cell.title} / {rival.name}"
    return _Comparison(title, ours, series, rival.verdict is Verdict.WRONG)


def _time(rival: Entry, *, even_wrong: bool) -> Series | None:
    if even_wrong and rival.verdict is not Verdict.FAILED:
        return rival.series
    return rival.time
