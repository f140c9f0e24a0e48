"""The report: a list of events, with queries over it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult

from qfuse.ir.events import (
    EXPAND,
    HOST,
    Checked,
    Event,
    Fired,
    Left,
    Lowered,
    Missed,
    Noted,
    RolledBack,
)
from qfuse.profile import Profile
from qfuse.profile.memory import LiveBytes
from qfuse.report.page import page_html
from qfuse.report.tables import render
from qfuse.snapshots import StageSnapshot


@dataclass(frozen=True, slots=True)
class Report:
    """All events of a compilation.

    ``print(report)`` shows it as text, ``rich.print(report)`` in color, :meth:`to_json` as data.

    Attributes:
        events: In the order in which they happened.
        facts: Properties of the whole compilation: target, backend, check, sizes, seconds.
        stages: Snapshots of the graph, for the page; not part of the JSON.
        memory: The live bytes of the lowered graph, for the page; not part of the JSON.
    """

    events: tuple[Event, ...]
    facts: dict[str, Any] = field(default_factory=dict)
    stages: tuple[StageSnapshot, ...] = field(default=(), repr=False, compare=False)
    memory: tuple[LiveBytes, ...] = field(default=(), repr=False, compare=False)

    @property
    def fused(self) -> tuple[Lowered, ...]:
        """The quantized ops that were lowered to a kernel, or that a backend claimed."""
        return tuple(e for e in self._of(Lowered) if e.kernel not in {EXPAND, HOST})

    @property
    def expanded(self) -> tuple[Lowered, ...]:
        """The quantized ops that no kernel accepts; they run as dequantize, float op, quantize."""
        return tuple(e for e in self._of(Lowered) if e.kernel == EXPAND)

    @property
    def refused(self) -> tuple[Lowered, ...]:
        """The ops of ATen that a backend was asked to claim, and refused."""
        return tuple(e for e in self._of(Lowered) if e.kernel == HOST)

    @property
    def claims(self) -> dict[str, str]:
        """What runs each op, by the name of its node: a kernel, a backend, or ``expand``.

        Ops of ATen are listed if a backend was asked to claim them; ``torch`` runs the others.
        """
        return {e.place.node: e.kernel for e in self._of(Lowered)}

    @property
    def left(self) -> tuple[Left, ...]:
        """The quantize and dequantize ops that were not fused, each with the reason."""
        return self._of(Left)

    @property
    def rolled_back(self) -> tuple[RolledBack, ...]:
        """The rewrites that changed values and were undone."""
        return self._of(RolledBack)

    @property
    def checks(self) -> tuple[Checked, ...]:
        """The results of all value checks."""
        return self._of(Checked)

    @property
    def notes(self) -> tuple[Noted, ...]:
        """Other remarks and warnings."""
        return self._of(Noted)

    @property
    def fired(self) -> Counter[str]:
        """How often each rule fired."""
        return Counter(e.rule for e in self._of(Fired))

    @property
    def kernels(self) -> Counter[str]:
        """The number of ops per kernel or backend; ``expand`` counts ops without one."""
        return Counter(e.kernel for e in self._of(Lowered) if e.kernel != HOST)

    @property
    def closest_misses(self) -> tuple[Missed, ...]:
        """For each node that a rule matched at but declined, the rule that came closest."""
        best: dict[str, Missed] = {}
        for miss in self._of(Missed):
            key = f"{miss.stage}/{miss.anchor.node}"
            # Every rule with a matching anchor misses; the one that came furthest is of interest.
            if key not in best or miss.progress > best[key].progress:
                best[key] = miss
        return tuple(best.values())

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: facts, totals, and every event with its kind."""
        return {
            "facts": self.facts,
            "fired": dict(self.fired),
            "kernels": dict(self.kernels),
            "events": [{"kind": type(e).__name__.lower(), **asdict(e)} for e in self.events],
        }

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return :meth:`to_dict` as JSON."""
        # Facts and events may hold dtypes and paths.
        return json.dumps(self.to_dict(), indent=indent, default=str)

    def to_html(
        self,
        path: str | Path,
        *,
        profile: Profile | None = None,
        sqnr: Mapping[str, float] | None = None,
    ) -> None:
        """Write the report as one HTML file, which needs no network and no server.

        Args:
            path: The file.
            profile: What ``fast.profile(...)`` returned, for measured times.
            sqnr: The signal-to-noise ratio in dB by path of the module.
        """
        Path(path).write_text(page_html(self, profile, sqnr), encoding="utf-8")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        del console, options
        yield from render(self)

    def __str__(self) -> str:
        # The same text everywhere, whatever the terminal is.
        console = Console(width=120, no_color=True, highlight=False)
        with console.capture() as capture:
            console.print(self)
        return capture.get()

    def _of(self, kind: type[Any]) -> tuple[Any, ...]:
        return tuple(e for e in self.events if isinstance(e, kind))
