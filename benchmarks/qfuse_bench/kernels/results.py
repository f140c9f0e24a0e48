"""The results of the kernel benchmark, as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from qfuse_bench.harness.machine import Setting
from qfuse_bench.kernels.cells import Cell
from qfuse_bench.kernels.contenders import OURS, Shape
from qfuse_bench.kernels.families import FAMILIES
from qfuse_bench.kernels.roofline import Limits
from qfuse_bench.kernels.targets import Judgement, judge


@dataclass(frozen=True, slots=True)
class Line:
    """A shape, with cold and with warm weights.

    Attributes:
        shape: Sizes of the product.
        cold: Weights came from memory.
        warm: Weights came from a cache; ``None`` if they do not fit in one.
    """

    shape: Shape
    cold: Cell | None
    warm: Cell | None

    @property
    def cells(self) -> tuple[Cell | None, Cell | None]:
        """Cold, warm."""
        return self.cold, self.warm


@dataclass(frozen=True, slots=True)
class KernelResults:
    """A whole run.

    Attributes:
        setting: Machine and software.
        instruction_sets: Paths of the kernels, the one that ran last.
        limits: The limits of the machine.
        rounds: Interleaved rounds per cell.
        cells: What was measured.
        others: The fraction of the machine that other programs used meanwhile.
    """

    setting: Setting
    instruction_sets: tuple[str, ...]
    limits: Limits
    rounds: int
    cells: tuple[Cell, ...]
    others: float

    @property
    def judgements(self) -> list[Judgement]:
        """Every target whose family was measured."""
        families = {cell.family for cell in self.cells}
        return [found for found in judge(self.cells) if found.target.family in families]

    def families(self) -> Iterator[tuple[str, str, tuple[str, ...], list[Line]]]:
        """Yield name, title, peers and lines of every measured family."""
        for name, family in FAMILIES.items():
            cells = {(c.shape, c.cold): c for c in self.cells if c.family == name}
            if cells:
                shapes = dict.fromkeys(shape for shape, _ in cells)
                lines = [Line(s, cells.get((s, True)), cells.get((s, False))) for s in shapes]
                yield name, family.title, _peers(lines), lines

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: all measurements, and the verdicts."""
        return {
            "setting": asdict(self.setting),
            "instruction_sets": self.instruction_sets,
            "limits": asdict(self.limits),
            "rounds": self.rounds,
            "others": self.others,
            "targets": [
                {
                    "text": str(found.target),
                    "cold": found.cold,
                    "verdict": found.verdict,
                    "reason": found.reason(self.limits),
                }
                for found in self.judgements
            ],
            "cells": [self._cell(cell) for cell in self.cells],
        }

    def _cell(self, cell: Cell) -> dict[str, Any]:
        ratios = {peer: cell.ratio(peer) for peer in cell.series if peer != OURS}
        return {
            "family": cell.family,
            **asdict(cell.shape),
            "cold": cell.cold,
            "limit": cell.limit(self.limits),
            "reached": cell.reached(self.limits),
            "seconds": {name: series.median for name, series in cell.series.items()},
            "p10": {name: series.p10 for name, series in cell.series.items()},
            "rounds": {name: series.rounds for name, series in cell.series.items()},
            "ratios": {peer: asdict(ratio) for peer, ratio in ratios.items() if ratio},
        }


def _peers(lines: list[Line]) -> tuple[str, ...]:
    found = (name for line in lines for cell in line.cells if cell for name in cell.series)
    return tuple(name for name in dict.fromkeys(found) if name != OURS)
