"""The results of a benchmark run: entries per model and recipe, pairs, and their means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from qfuse_bench.harness.comparison import Entry
from qfuse_bench.harness.machine import Setting
from qfuse_bench.harness.measure import compare
from qfuse_bench.harness.stats import Ratio, mean_ratio
from qfuse_bench.peers.contenders import Engine, FloatType


@dataclass(frozen=True, slots=True)
class Pair:
    """Two engines on the same quantized model at the same float type.

    Attributes:
        model: What tables call the model and its size.
        recipe: What tables call the recipe.
        float_type: What is not quantized was computed in this.
        plain: The float model under ``torch.compile`` at this type.
        theirs: Inductor with torchao's patterns.
        ours: qfuse.
    """

    model: str
    recipe: str
    float_type: FloatType
    plain: Entry
    theirs: Entry
    ours: Entry

    @property
    def ratio(self) -> Ratio | None:
        """Qfuse's time over the other's; ``None`` unless both are valid."""
        return _ratio(self.ours, self.theirs)

    @property
    def speedup_over_float(self) -> Ratio | None:
        """The compiled float model's time over ours: above 1 quantizing paid."""
        return _ratio(self.plain, self.ours)


@dataclass(frozen=True, slots=True)
class Loss:
    """A quantized model that is slower under qfuse than the float model is.

    Attributes:
        model: What tables call the model and its size.
        recipe: What tables call the recipe.
        ours: qfuse, on the quantized model.
        floats: The fastest contender on the float model, of the same float type.
        ratio: Our time over that.
    """

    model: str
    recipe: str
    ours: Entry
    floats: Entry
    ratio: Ratio

    def __str__(self) -> str:
        """``bert, static: qfuse f32 takes 1.20 of inductor f32``."""
        share = f"takes {self.ratio.value:.2f} of {self.floats.name}"
        return f"{self.model}, {self.recipe}: {self.ours.name} {share}"


@dataclass(frozen=True, slots=True)
class Match:
    """One model under one recipe: all contenders of the same rounds.

    Attributes:
        case: Name of the model and its size.
        what: The size in words.
        recipe: Name of the recipe.
        entries: By the contender's name.
        pairs: Those of them that are compared.
        others: The fraction of the machine that other programs used meanwhile.
        eager: Name of the float model without a compiler among the entries.
    """

    case: str
    what: str
    recipe: str
    entries: Mapping[str, Entry]
    pairs: tuple[Pair, ...]
    others: float
    eager: str = ""

    def losses(self) -> list[Loss]:
        """Return where qfuse is surely slower than the fastest float model of its float type.

        A bfloat16 model is no alternative for who keeps float32: its values are others.
        """
        found = []
        for pair in self.pairs:
            peers = [pair.plain]
            if pair.float_type is FloatType.F32 and self.eager in self.entries:
                peers.append(self.entries[self.eager])
            timed = [(_ratio(pair.ours, peer), peer) for peer in peers]
            worst = max(
                ((ratio, peer) for ratio, peer in timed if ratio is not None),
                key=lambda one: one[0].value,
                default=None,
            )
            if worst is not None and worst[0].low > 1:
                found.append(Loss(self.case, self.recipe, pair.ours, worst[1], worst[0]))
        return found


@dataclass(frozen=True, slots=True)
class Results:
    """A whole run.

    Attributes:
        setting: The machine and software.
        rounds: Rounds per match.
        matches: In the order in which they were measured.
        skipped: What could not be measured at all, and why.
    """

    setting: Setting
    rounds: int
    matches: tuple[Match, ...]
    skipped: Mapping[str, str]

    @property
    def pairs(self) -> list[Pair]:
        """All pairs."""
        return [pair for match in self.matches for pair in match.pairs]

    @property
    def others(self) -> float:
        """The worst of the matches: how busy the machine was with other things."""
        return max((match.others for match in self.matches), default=0.0)

    def mean(
        self, recipe: str | None = None, float_type: FloatType | None = None
    ) -> tuple[Ratio | None, int]:
        """Return the geometric mean of the ratios that there are, and how many there are.

        Args:
            recipe: Of this recipe only.
            float_type: At this float type only.
        """
        chosen = [
            pair
            for pair in self.pairs
            if recipe in {None, pair.recipe} and float_type in {None, pair.float_type}
        ]
        series = [(pair.ours.time, pair.theirs.time) for pair in chosen]
        counted = [(a.rounds, b.rounds) for a, b in series if a is not None and b is not None]
        return mean_ratio(counted), len(counted)

    def means(self) -> list[tuple[str, Ratio, int]]:
        """Return the means of the whole, of each recipe and of each float type, with counts."""
        recipes = dict.fromkeys(pair.recipe for pair in self.pairs)
        asked: list[tuple[str, str | None, FloatType | None]] = [("all", None, None)]
        asked += [(recipe, recipe, None) for recipe in recipes]
        asked += [(f"all at {kind}", None, kind) for kind in FloatType]
        found = []
        for name, recipe, float_type in asked:
            ratio, count = self.mean(recipe, float_type)
            if ratio is not None:
                found.append((name, ratio, count))
        return found

    @property
    def losses(self) -> list[Loss]:
        """The cells that are surely slower than the float model."""
        return [loss for match in self.matches for loss in match.losses()]

    @property
    def against_float(self) -> str:
        """``none of 12 cells are slower than the float model``."""
        count = sum(pair.speedup_over_float is not None for pair in self.pairs)
        lost = len(self.losses)
        verb = "is" if lost == 1 else "are"
        return f"{lost or 'none'} of {count} cells {verb} slower than the float model"

    def trouble(self) -> list[str]:
        """Return a line for every missing time, with the reason."""
        lines = [f"{name}: {reason}" for name, reason in self.skipped.items()]
        seen: dict[str, None] = {}
        for match in self.matches:
            for entry in match.entries.values():
                if entry.reason:
                    seen[f"{match.case}, {entry.name}: {entry.verdict}, {entry.reason}"] = None
        return [*lines, *seen]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: all measurements, and the ratios."""
        return {
            "setting": asdict(self.setting),
            "rounds": self.rounds,
            "means": [
                {"of": name, "count": count, **asdict(ratio)} for name, ratio, count in self.means()
            ],
            "matches": [
                {
                    "case": match.case,
                    "what": match.what,
                    "recipe": match.recipe,
                    "others": match.others,
                    "entries": [entry_values(entry) for entry in match.entries.values()],
                    "pairs": [_pair(pair) for pair in match.pairs],
                }
                for match in self.matches
            ],
            "losses_to_float": [str(loss) for loss in self.losses],
            "skipped": dict(self.skipped),
        }


def pairs_of(
    case: str,
    recipe: str,
    entries: Mapping[str, Entry],
    named: Mapping[tuple[Engine, FloatType, bool], str],
    float_types: Iterable[FloatType],
) -> tuple[Pair, ...]:
    """Pair the contenders to compare.

    Args:
        case: What tables call the model.
        recipe: What tables call the recipe.
        entries: By the contender's name.
        named: The contender's name by engine, float type, and whether it is quantized.
        float_types: The float types that were measured.
    """
    return tuple(
        Pair(
            case,
            recipe,
            float_type,
            plain=entries[named[Engine.INDUCTOR, float_type, False]],
            theirs=entries[named[Engine.INDUCTOR, float_type, True]],
            ours=entries[named[Engine.QFUSE, float_type, True]],
        )
        for float_type in float_types
    )


def _ratio(above: Entry, below: Entry) -> Ratio | None:
    if above.time is None or below.time is None:
        return None
    return compare(above.time, below.time)


def entry_values(entry: Entry, *, calls: bool = False) -> dict[str, Any]:
    """Return the results of one contender as JSON values, with the time of every call if asked."""
    values = asdict(entry)
    if entry.series is not None:
        values["median"], values["p10"] = entry.series.median, entry.series.p10
        kept = {"calls": entry.series.calls} if calls else {}
        values["series"] = {"rounds": entry.series.rounds, **kept}
    return values


def _pair(pair: Pair) -> dict[str, Any]:
    return {
        "float_type": pair.float_type,
        "ours": pair.ours.name,
        "theirs": pair.theirs.name,
        "ratio": None if pair.ratio is None else asdict(pair.ratio),
    }
