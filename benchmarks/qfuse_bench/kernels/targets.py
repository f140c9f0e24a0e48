"""The performance targets of the kernels, and whether they are reached.

A cell counts for a target only if the 95 % interval of its ratio excludes the bound. Nothing here
knows a result: verdicts are made of what was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from qfuse_bench.harness.stats import Ratio, mean_ratio
from qfuse_bench.kernels.cells import MOST_STREAMED_ROWS, READ, Cell
from qfuse_bench.kernels.contenders import OURS
from qfuse_bench.kernels.roofline import Limits
from qfuse_bench.report import format as words

ROWS = (1, 4, 16, 32, 128, 512)
"""M of the grid."""

SIDES = (1024, 2816, 4096, 11008)
"""K and N of the grid."""

_FEW = tuple(m for m in ROWS if m <= MOST_STREAMED_ROWS)
_MANY = tuple(m for m in ROWS if m >= 128)  # noqa: PLR2004 - where the targets draw the line


class Verdict(StrEnum):
    """Whether a target is reached."""

    MET = "met"
    MISSED = "missed"
    UNDECIDED = "undecided"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on the time of our kernel over that of a peer.

    Attributes:
        family: Name of the family.
        peer: The contender that ours is compared with.
        bound: What the ratio is to be at most.
        rows: The M that it is about.
        mean: It is about the geometric mean of the cells; if not, about each of them.
        cold_only: It is about weights that come from memory.
    """

    family: str
    peer: str
    bound: float
    rows: tuple[int, ...] = ROWS
    mean: bool = False
    cold_only: bool = False

    def __str__(self) -> str:
        what = "geometric mean" if self.mean else "each cell"
        return f"{self.family} / {self.peer}, M of {self._rows()}: {what} at most {self.bound:.2f}"

    def _rows(self) -> str:
        return ", ".join(map(str, self.rows))

    def about(self, cell: Cell) -> bool:
        """Whether the target applies to the cell."""
        rows = cell.shape.m in self.rows
        return self.family == cell.family and rows and self.peer in cell.series


def _w4a8(group: int, of_32: float, of_many: float) -> tuple[Target, ...]:
    family = f"w4a8-g{group}"
    return (
        Target(family, "qlinear", 1 / 1.6, _FEW, cold_only=True),
        Target(family, "qlinear", of_32, (32,)),
        Target(family, "qlinear", of_many, _MANY),
        Target(family, "linear bf16", 1.0, _MANY),
    )


def _weight_only(family: str) -> tuple[Target, ...]:
    return (
        Target(family, READ, 1 / 0.8, _FEW, cold_only=True),
        Target(family, "linear", 1.4, (32,)),
        Target(family, "linear", 1.2, _MANY),
    )


TARGETS: tuple[Target, ...] = (
    Target("w8a8", "qlinear", 1.1, mean=True),
    Target("w8a8", "qlinear", 1.3),
    Target("w8a8", "_int_mm", 1 / 1.5, mean=True),
    Target("w8a8", "_int_mm", 1 / 1.5),
    *_w4a8(128, 1.3, 1.6),
    *_w4a8(64, 1.6, 2.2),
    *_w4a8(32, 2.2, 2.6),
    *_weight_only("w8a16"),
    *_weight_only("w8a32"),
    *_weight_only("w4a16-g128"),
    *_weight_only("w4a16-g32"),
    *_weight_only("w4a32-g128"),
    *_weight_only("w4a32-g32"),
)


@dataclass(frozen=True, slots=True)
class Judgement:
    """The outcome of a target.

    Attributes:
        target: The target.
        cold: Judged by cold cells; if not, by warm ones.
        verdict: Whether it is reached.
        of: How many cells there are.
        met: How many are surely below the bound.
        missed: How many are surely above it.
        ratio: The geometric mean, or the ratio of the worst cell.
        worst: The worst cell.
    """

    target: Target
    cold: bool
    verdict: Verdict
    of: int
    met: int
    missed: int
    ratio: Ratio | None
    worst: Cell | None

    def reason(self, limits: Limits) -> str:
        """Return what the verdict is made of, on a machine with these limits."""
        if self.ratio is None or self.worst is None:
            return "no cells"
        ratio = words.ratio(self.ratio)
        if self.target.mean:
            return f"{ratio} over {self.of} cells"
        reached = self.worst.reached(limits)
        return (
            f"{self.met} below, {self.missed} above, {self.of - self.met - self.missed} undecided; "
            f"worst {ratio} at {self.worst.shape}, {reached:.0%} of its roofline"
        )


def judge(cells: Iterable[Cell], targets: Sequence[Target] = TARGETS) -> list[Judgement]:
    """Judge every target by the cells, by cold and by warm ones apart."""
    listed = list(cells)
    judgements: list[Judgement] = []
    for target in targets:
        about = [cell for cell in listed if target.about(cell)]
        judgements.extend(
            _judge(target, [c for c in about if c.cold is cold], cold=cold)
            for cold in ((True,) if target.cold_only else (True, False))
        )
    return judgements


def _judge(target: Target, cells: list[Cell], *, cold: bool) -> Judgement:
    found = [(ratio, cell) for cell in cells if (ratio := cell.ratio(target.peer)) is not None]
    if not found:
        return Judgement(target, cold, Verdict.NOT_MEASURED, 0, 0, 0, None, None)
    worst, at = max(found, key=lambda pair: pair[0].value)
    met = sum(ratio.high < target.bound for ratio, _ in found)
    missed = sum(ratio.low > target.bound for ratio, _ in found)
    shown: Ratio | None = worst
    verdict = _verdict(met == len(found), missed > 0)
    if target.mean:
        shown = mean_ratio([(c.series[OURS].rounds, c.series[target.peer].rounds) for c in cells])
        assert shown is not None, "there are cells"
        verdict = _verdict(shown.high < target.bound, shown.low > target.bound)
    return Judgement(target, cold, verdict, len(found), met, missed, shown, at)


def _verdict(met: bool, missed: bool) -> Verdict:
    if missed:
        return Verdict.MISSED
    return Verdict.MET if met else Verdict.UNDECIDED
