"""The performance goals of qfuse against its peers, as data.

A bar is met if qfuse takes at most so much of the time of every rival with correct answers, with
the whole 95 % interval; missed if the whole interval is above it for one of them; otherwise
undecided.
All contenders run the same model with the float rest in the same type, in the same rounds, and
other engines with weights of the same bits. Only one bar is against other bits: 4-bit weights for
one token have to beat whatever 8-bit or 4-bit recipe there is. What all cells together have to
reach is in :mod:`qfuse_bench.experiments.aims`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from qfuse_bench.harness.comparison import Entry
from qfuse_bench.harness.measure import compare
from qfuse_bench.harness.stats import Ratio
from qfuse_bench.peers.cases import CASES, CONVNETS, RECIPES, Case
from qfuse_bench.peers.contenders import Contender, Engine, FloatType

_F32, _BF16 = FloatType.F32, FloatType.BF16

INDUCTOR = "Inductor, the same model"
OPENVINO = "OpenVINO"
ONNX_RUNTIME = "ONNX Runtime"
FLOAT = "Inductor, the float model"
BEST_RECIPE = "the best int8 or int4 recipe"

ANY_BITS = "any-bits"
"""The recipe of the cells that are compared with other recipes."""

DECODE = "llama-decode"
"""The case of one token; all others are whole prompts, images or sounds."""

_MOST_OF_A_RIVAL = 1.05
_MOST_OF_FLOAT = 1.0
_MOST_OF_ANY_RECIPE = 0.5
_MODELS = ("llama-prefill", DECODE, "minilm", "bert", "vit", "whisper")
_RECIPES = ("static", "dynamic", "w4a8", "weight-only", "w4a16")
# What Inductor has for 4-bit weights: torchao's linears, and its packed layout for aten's product.
_PACKED = {"w4a16": ("w4a16", "w4a16-packed")}


class Outcome(StrEnum):
    """The outcome of a bar."""

    MET = "met"
    MISSED = "missed"
    UNDECIDED = "undecided"
    UNEQUAL = "not comparable"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Way:
    """How one model is run.

    Attributes:
        engine: The engine.
        float_type: Dtype of unquantized ops.
        recipe: The zoo's name of the recipe; ``None`` for the float model.
        narrowed: See :class:`qfuse_bench.peers.contenders.Contender`.
    """

    engine: Engine
    float_type: FloatType
    recipe: str | None
    narrowed: bool = False

    def on(self, case: Case) -> Contender:
        """Return it for a model."""
        return Contender(
            engine=self.engine,
            float_type=self.float_type,
            model=case.model,
            sizes=case.sizes,
            recipe=self.recipe,
            narrowed=self.narrowed,
        )


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar: rivals that qfuse is measured by.

    Attributes:
        name: The name in tables.
        most: The ratio to the time of the best rival that is allowed.
        rivals: The best rival with correct answers counts.
    """

    name: str
    most: float
    rivals: tuple[Way, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """One model as qfuse runs it, and what it is compared with in the same rounds.

    Attributes:
        case: Name in :data:`qfuse_bench.peers.cases.CASES`.
        ours: How qfuse runs it.
        bars: What it is measured by.
        recipe: Name of the recipe in options, or :data:`ANY_BITS`.
    """

    case: str
    ours: Way
    bars: tuple[Bar, ...]
    recipe: str = "static"

    @property
    def ways(self) -> list[Way]:
        """All that take part, ours first."""
        return list(dict.fromkeys([self.ours, *(way for bar in self.bars for way in bar.rivals)]))

    @property
    def title(self) -> str:
        """What is measured."""
        return f"{self.case}: {self.ours.on(CASES[self.case]).name}"


@dataclass(frozen=True, slots=True)
class Finding:
    """What the rounds say about one bar.

    Attributes:
        bar: The bar.
        outcome: Whether it is met.
        best: Name of the fastest rival that counts; "" if there is none.
        ratio: Our time over that of the best rival.
        reason: Why nothing was measured.
    """

    bar: Bar
    outcome: Outcome
    best: str = ""
    ratio: Ratio | None = None
    reason: str = ""

    @property
    def text(self) -> str:
        """The outcome in words."""
        return f"{self.outcome}: {self.reason}" if self.reason else str(self.outcome)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "bar": self.bar.name,
            "most": self.bar.most,
            "outcome": self.outcome,
            "best": self.best,
            "ratio": None if self.ratio is None else asdict(self.ratio),
            "reason": self.reason,
        }


def findings_of(
    cell: Cell, entries: Mapping[str, Entry], unlimited: frozenset[Engine] = frozenset()
) -> tuple[Finding, ...]:
    """Judge every bar of a cell by what was measured.

    Args:
        cell: The cell.
        entries: By the contender's name; one that could not take part at all may be absent.
        unlimited: Engines that used more instruction sets than the others.
    """
    case = CASES[cell.case]
    ours = entries[cell.ours.on(case).name]

    def finding(bar: Bar) -> Finding:
        equal = [way for way in bar.rivals if way.engine not in unlimited]
        names = [way.on(case).name for way in equal or bar.rivals]
        found = judge(bar, ours, [entries[name] for name in names if name in entries])
        if equal or found.ratio is None:
            return found
        return replace(
            found, outcome=Outcome.UNEQUAL, reason="it cannot be held to these instruction sets"
        )

    return tuple(map(finding, cell.bars))


def judge(bar: Bar, ours: Entry, rivals: Sequence[Entry]) -> Finding:
    """Judge one bar by the times of ours and of its rivals."""
    if ours.time is None:
        return Finding(bar, Outcome.NOT_MEASURED, reason=ours.reason or "qfuse was not timed")
    ratios: dict[str, Ratio] = {}
    for rival in rivals:
        ratio = None if rival.time is None else compare(ours.time, rival.time)
        if ratio is not None:
            ratios[rival.name] = ratio
    if not ratios:
        reasons = dict.fromkeys(rival.reason for rival in rivals if rival.reason)
        reason = "; ".join(reasons) or "no rival was measured"
        return Finding(bar, Outcome.NOT_MEASURED, reason=reason)
    best = max(ratios, key=lambda name: ratios[name].value)
    return Finding(bar, outcome_of(bar.most, list(ratios.values())), best, ratios[best])


def outcome_of(most: float, ratios: Sequence[Ratio]) -> Outcome:
    """Return whether all ratios are at most so much."""
    if all(ratio.high <= most for ratio in ratios):
        return Outcome.MET
    if any(ratio.low > most for ratio in ratios):
        return Outcome.MISSED
    return Outcome.UNDECIDED


def _grid(case: str, float_type: FloatType, recipe: str) -> Cell:
    """One model under one recipe, against every engine and the float model."""
    name = RECIPES[recipe]
    ours = Way(
        Engine.QFUSE,
        float_type,
        name,
        # PT2E makes graphs of float32 operators.
        narrowed=float_type is _BF16 and name == "w8a8-static",
    )
    forms = _PACKED.get(name, (name,))
    bars = (
        Bar(INDUCTOR, _MOST_OF_A_RIVAL, _inductor(float_type, forms)),
        *_other_engines(float_type, name, _MOST_OF_A_RIVAL),
        Bar(FLOAT, _MOST_OF_FLOAT, (Way(Engine.INDUCTOR, float_type, None),)),
    )
    return Cell(case, ours, bars, recipe)


def _inductor(float_type: FloatType, recipes: Sequence[str]) -> tuple[Way, ...]:
    return tuple(Way(Engine.INDUCTOR, float_type, recipe) for recipe in recipes)


def _other_engines(float_type: FloatType, recipe: str, most: float) -> tuple[Bar, ...]:
    """Return the bars of other engines at this float type.

    On CPUs ONNX Runtime has only f32, and no int8 weights with float activations.
    """
    bars = [Bar(OPENVINO, most, (Way(Engine.OPENVINO, float_type, recipe),))]
    if float_type is _F32 and recipe != "w8a16":
        bars.append(Bar(ONNX_RUNTIME, most, (Way(Engine.ONNX_RUNTIME, float_type, recipe),)))
    return tuple(bars)


def _any_bits(float_type: FloatType) -> Cell:
    """One token with 4-bit weights, against whatever 8-bit or 4-bit recipe there is."""
    recipes = ("w8a8-static", "w8a8-dynamic", "w8a16", "w4a8", "w4a16-packed")
    others = (way for bar in _other_engines(float_type, "w4a8", 1.0) for way in bar.rivals)
    best = Bar(BEST_RECIPE, _MOST_OF_ANY_RECIPE, (*_inductor(float_type, recipes), *others))
    return Cell(DECODE, Way(Engine.QFUSE, float_type, "w4a8"), (best,), ANY_BITS)


def _convnet(case: str) -> Cell:
    """A convolutional network, with the float rest in f32."""
    same = Bar("Inductor, the same PT2E model", 1.0, _inductor(_F32, ("w8a8-static",)))
    others = _other_engines(_F32, "w8a8-static", 1.0)
    return Cell(case, Way(Engine.QFUSE, _F32, "w8a8-static"), (same, *others))


def _cells_of(case: str, float_type: FloatType) -> list[Cell]:
    cells = [_grid(case, float_type, recipe) for recipe in _RECIPES]
    return [*cells, _any_bits(float_type)] if case == DECODE else cells


CELLS: tuple[Cell, ...] = tuple(
    cell for case in _MODELS for kind in FloatType for cell in _cells_of(case, kind)
)
"""In the order in which they are measured and shown."""

CONVNET_CELLS: tuple[Cell, ...] = tuple(map(_convnet, CONVNETS))
"""Convolutional networks against every engine, likewise."""

GOAL_RECIPES: tuple[str, ...] = (*_RECIPES, ANY_BITS)
"""Names of recipes in options."""
