"""What a run of the goals has measured, as data and as a file that a later run goes on with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pydantic

from qfuse.ir.errors import OptionsError
from qfuse_bench.experiments.aims import Aim, AimFinding, reached
from qfuse_bench.experiments.goals import Cell, Finding, findings_of
from qfuse_bench.harness.comparison import Entry, Verdict
from qfuse_bench.harness.machine import Setting
from qfuse_bench.harness.machine_class import MachineClass
from qfuse_bench.peers.cases import CASES
from qfuse_bench.peers.contenders import Engine
from qfuse_bench.report.results import entry_values

WITHOUT_LIMIT = frozenset((Engine.ONNX_RUNTIME,))
"""Engines that no variable holds to fewer instruction sets."""


@dataclass(frozen=True, slots=True)
class CellResult:
    """One cell and its contenders.

    Attributes:
        cell: What was asked.
        entries: By the contender's name, without those that only give answers.
        others: The fraction of the machine that other programs used meanwhile.
        reason: Why nothing was measured; "" otherwise.
        unlimited: Engines that used more instruction sets than the others.
    """

    cell: Cell
    entries: Mapping[str, Entry]
    others: float
    reason: str = ""
    unlimited: frozenset[Engine] = frozenset()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The outcome of every bar."""
        return () if self.reason else findings_of(self.cell, self.entries, self.unlimited)

    @property
    def rows(self) -> list[Entry]:
        """All contenders, ours first."""
        if self.reason:
            return []
        ours = self.cell.ours.on(CASES[self.cell.case]).name
        return sorted(self.entries.values(), key=lambda entry: entry.name != ours)


@dataclass(frozen=True, slots=True)
class GoalResults:
    """A whole run.

    Attributes:
        setting: What it was measured on.
        rounds: Rounds per cell.
        cells: In the order in which they were measured.
        absent: Contenders that could not take part, and what to do about it.
        kind: The class of machine that the engines were held to.
        aims: What all cells together have to reach.
        whole: All cells that there are, measured or not.
    """

    setting: Setting
    rounds: int
    cells: tuple[CellResult, ...]
    absent: Mapping[str, str]
    kind: MachineClass
    aims: tuple[Aim, ...] = ()
    whole: tuple[Cell, ...] = ()

    @property
    def others(self) -> float:
        """The worst of the cells: how busy the machine was with other things."""
        return max((cell.others for cell in self.cells), default=0.0)

    @property
    def unlimited(self) -> list[Engine]:
        """Engines that used more instruction sets than the others."""
        return sorted({engine for cell in self.cells for engine in cell.unlimited})

    def reached(self) -> list[AimFinding]:
        """Return the outcome of every aim for this class of machine."""
        measured = [(one.cell, one.entries) for one in self.cells if not one.reason]
        return reached(measured, self.kind, unlimited_engines(self.kind), self.whole, self.aims)

    def trouble(self) -> list[str]:
        """Return a line for everything that is not a time, and why."""
        lines = [f"{name}: {reason}" for name, reason in self.absent.items()]
        for result in self.cells:
            if result.reason:
                lines.append(f"{result.cell.title}: {result.reason}")
            lines += [
                f"{result.cell.case}, {entry.name}: {entry.verdict}, {entry.reason}"
                for entry in result.entries.values()
                if entry.verdict is not Verdict.OK
            ]
        return list(dict.fromkeys(lines))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "rounds": self.rounds,
            "class": self.kind.name,
            "setting": asdict(self.setting),
            "absent": dict(self.absent),
            "aims": [finding.to_dict() for finding in self.reached()],
            "cells": [
                {
                    "case": result.cell.case,
                    "recipe": result.cell.recipe,
                    "ours": result.cell.ours.on(CASES[result.cell.case]).name,
                    "others": result.others,
                    "reason": result.reason,
                    "findings": [finding.to_dict() for finding in result.findings],
                    "entries": [entry_values(entry, calls=True) for entry in result.rows],
                }
                for result in self.cells
            ],
        }


def unlimited_engines(kind: MachineClass) -> frozenset[Engine]:
    """Return the engines that use more instruction sets than this class allows the others."""
    return frozenset() if kind.is_whole else WITHOUT_LIMIT


def measured_before(path: Path, wanted: GoalResults, cells: Iterable[Cell]) -> list[CellResult]:
    """Return those of ``cells`` that a file of an earlier run has, in their order.

    Args:
        path: Holds :meth:`GoalResults.to_dict`; it may be missing.
        wanted: The setting, the rounds and the class of machine that the file must have too.
        cells: What to look for.

    Raises:
        OptionsError: The file holds something else, or was measured otherwise.
    """
    if not path.exists():
        return []
    saved = _read(path)
    _check_equal(path, saved, wanted)
    known = {(one.case, one.recipe, one.ours): one for one in saved.cells}
    found = []
    for cell in cells:
        one = known.get((cell.case, cell.recipe, cell.ours.on(CASES[cell.case]).name))
        if one is not None:
            entries = {entry.name: entry for entry in one.entries}
            limited = unlimited_engines(wanted.kind)
            found.append(CellResult(cell, entries, one.others, one.reason, limited))
    return found


@dataclass(frozen=True, slots=True)
class _SavedCell:
    case: str
    recipe: str
    ours: str
    others: float
    reason: str
    entries: tuple[Entry, ...]


@pydantic.dataclasses.dataclass(frozen=True)
class _Saved:
    setting: Setting
    rounds: int
    cells: tuple[_SavedCell, ...]
    kind: str = pydantic.Field(alias="class")


def _read(path: Path) -> _Saved:
    try:
        return pydantic.TypeAdapter(_Saved).validate_python(json.loads(path.read_text("utf-8")))
    except (ValueError, OSError) as error:
        raise OptionsError(
            f"{path} holds no results of --goals: {error}", fix="name another file"
        ) from error


def _check_equal(path: Path, saved: _Saved, wanted: GoalResults) -> None:
    pairs = {
        "rounds": (saved.rounds, wanted.rounds),
        "class of machine": (saved.kind, wanted.kind.name),
        # A run may go on for days.
        "setting": (saved.setting, replace(wanted.setting, date=saved.setting.date)),
    }
    for name, (theirs, ours) in pairs.items():
        if theirs != ours:
            raise OptionsError(
                f"{path} has another {name}: {theirs}, and this run {ours}",
                fix="name another file, or measure with the code and the options of then",
            )
