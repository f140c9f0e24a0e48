"""The performance goals of qfuse against its peers, as data.

A bar is met if qfuse is faster than every rival with correct answers, by the factor and with the
whole 95 % interval; missed if the whole interval is above it for one of them; otherwise undecided.
All contenders run the same model with the float rest in the same type, in the same
rounds, and other engines with weights of the same bits. Only one bar is against other bits: 4-bit
weights for one token have to beat whatever 8-bit or 4-bit recipe Inductor and torchao have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from qfuse_bench.harness.comparison import Entry
from qfuse_bench.harness.measure import compare
from qfuse_bench.harness.stats import Ratio
from qfuse_bench.peers.cases import CASES, CONVNETS, Case
from qfuse_bench.peers.contenders import Contender, Engine, FloatType

_F32, _BF16 = FloatType.F32, FloatType.BF16


class Outcome(StrEnum):
    """The outcome of a bar."""

    MET = "met"
    MISSED = "missed"
    UNDECIDED = "undecided"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Way:
    """How one model is run.

    Attributes:
        engine: The engine.
        float_type: Dtype of unquantized ops.
        recipe: The zoo's name of the recipe.
        group_size: Weights per scale; ``None`` for the recipe's default.
        narrowed: See :class:`qfuse_bench.peers.contenders.Contender`.
    """

    engine: Engine
    float_type: FloatType
    recipe: str
    group_size: int | None = None
    narrowed: bool = False

    def on(self, case: Case) -> Contender:
        """Return it for a model."""
        return Contender(
            engine=self.engine,
            float_type=self.float_type,
            model=case.model,
            sizes=case.sizes,
            recipe=self.recipe,
            group_size=self.group_size,
            narrowed=self.narrowed,
        )


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar: rivals that qfuse is to be faster than.

    Attributes:
        name: The name in tables.
        factor: The speedup over the best rival that is to be reached.
        rivals: The best rival with correct answers counts.
    """

    name: str
    factor: float
    rivals: tuple[Way, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """One model as qfuse runs it, and what it is compared with in the same rounds.

    Attributes:
        case: Name in :data:`qfuse_bench.peers.cases.CASES`.
        ours: How qfuse runs it.
        bars: What it is to be ahead of.
    """

    case: str
    ours: Way
    bars: tuple[Bar, ...]

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
            "factor": self.bar.factor,
            "outcome": self.outcome,
            "best": self.best,
            "ratio": None if self.ratio is None else asdict(self.ratio),
            "reason": self.reason,
        }


def findings_of(cell: Cell, entries: Mapping[str, Entry]) -> tuple[Finding, ...]:
    """Judge every bar of a cell by what was measured.

    Args:
        cell: The cell.
        entries: By the contender's name; one that could not take part at all may be absent.
    """
    case = CASES[cell.case]
    ours = entries[cell.ours.on(case).name]
    return tuple(
        _judge(bar, ours, [entries[n] for w in bar.rivals if (n := w.on(case).name) in entries])
        for bar in cell.bars
    )


def _judge(bar: Bar, ours: Entry, rivals: list[Entry]) -> Finding:
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
    return Finding(bar, _outcome(bar, list(ratios.values())), best, ratios[best])


def _outcome(bar: Bar, ratios: list[Ratio]) -> Outcome:
    most = 1 / bar.factor
    if all(ratio.high <= most for ratio in ratios):
        return Outcome.MET
    if any(ratio.low > most for ratio in ratios):
        return Outcome.MISSED
    return Outcome.UNDECIDED


def _qfuse(float_type: FloatType, recipe: str, **options: Any) -> Way:
    return Way(Engine.QFUSE, float_type, recipe, **options)


def _inductor(float_type: FloatType, recipe: str, **options: Any) -> Way:
    return Way(Engine.INDUCTOR, float_type, recipe, **options)


def _other_engines(float_type: FloatType, recipe: str) -> tuple[Bar, ...]:
    """Return the bars of other engines at this float type; ONNX Runtime has only f32 on CPUs."""
    bars = [Bar("OpenVINO", 1.0, (Way(Engine.OPENVINO, float_type, recipe),))]
    if float_type is _F32:
        bars.append(Bar("ONNX Runtime", 1.0, (Way(Engine.ONNX_RUNTIME, float_type, recipe),)))
    return tuple(bars)


def _dynamic(case: str, float_type: FloatType) -> Cell:
    same = Bar("Inductor, the same torchao model", 1.5, (_inductor(float_type, "w8a8-dynamic"),))
    others = _other_engines(float_type, "w8a8-dynamic")
    return Cell(case, _qfuse(float_type, "w8a8-dynamic"), (same, *others))


def _static(case: str) -> tuple[Cell, Cell]:
    autocast = Bar("Inductor + PT2E under bf16 autocast", 1.15, (_inductor(_BF16, "w8a8-static"),))
    narrowed = _qfuse(_BF16, "w8a8-static", narrowed=True)
    return (
        Cell(case, narrowed, (autocast, *_other_engines(_BF16, "w8a8-static"))),
        Cell(case, _qfuse(_F32, "w8a8-static"), _other_engines(_F32, "w8a8-static")),
    )


def _decode(float_type: FloatType, group_size: int | None = None) -> Cell:
    """One token with 4-bit weights, against whatever 8-bit or 4-bit recipe there is."""
    recipes = ("w8a8-static", "w8a8-dynamic", "w8a16", "w4a8", "w4a16-packed")
    best = Bar(
        "the best int8 or int4 recipe of Inductor and torchao",
        1.5,
        tuple(_inductor(float_type, recipe) for recipe in recipes),
    )
    others = () if group_size else _other_engines(float_type, "w4a8")
    ours = _qfuse(float_type, "w4a8", group_size=group_size)
    return Cell("llama-decode", ours, (best, *others))


def _convnet(case: str) -> Cell:
    """A convolutional network, with the float rest in f32."""
    same = Bar("Inductor, the same PT2E model", 1.0, (_inductor(_F32, "w8a8-static"),))
    others = _other_engines(_F32, "w8a8-static")
    return Cell(case, _qfuse(_F32, "w8a8-static"), (same, *others))


CELLS: tuple[Cell, ...] = (
    *(_dynamic("llama-prefill", kind) for kind in FloatType),
    *_static("llama-prefill"),
    *(_decode(kind) for kind in FloatType),
    _decode(_BF16, group_size=128),
    Cell("llama-decode", _qfuse(_F32, "w8a8-static"), _other_engines(_F32, "w8a8-static")),
    *(_dynamic("minilm", kind) for kind in FloatType),
    *_static("minilm"),
)
"""In the order in which they are measured and shown."""

CONVNET_CELLS: tuple[Cell, ...] = tuple(map(_convnet, CONVNETS))
"""Convolutional networks against every engine, likewise."""
