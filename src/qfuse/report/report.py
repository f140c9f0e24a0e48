"""The report: a list of events, with queries over it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult

from qfuse.ir.events import (
    EXPAND,
    FLOAT,
    HOST,
    NO_KERNELS,
    Checked,
    Event,
    Fired,
    Left,
    Lowered,
    Missed,
    Noted,
    RolledBack,
)
from qfuse.ir.files import write_output
from qfuse.profile import Profile
from qfuse.profile.memory import LiveBytes
from qfuse.report.actions import Action, actions_of
from qfuse.report.data import SCHEMA, event_data, finite, read_report
from qfuse.report.facts import Facts
from qfuse.report.frame import to_frame
from qfuse.report.misses import closest
from qfuse.report.page import page_html
from qfuse.report.page.given import check_overlays
from qfuse.report.screen import COLUMNS, first_screen
from qfuse.report.tables import render_verbose
from qfuse.report.work import WorkShare, work_share
from qfuse.snapshots import StageSnapshot

_WIDE = 120


@dataclass(frozen=True, slots=True)
class Report:
    """All events of a compilation.

    ``print(report)`` shows a verdict and what to do on one screen, :meth:`text` with ``verbose``
    everything, ``rich.print(report)`` the screen in color, :meth:`to_json` the data.

    Attributes:
        events: In the order in which they happened.
        facts: Facts about the whole compilation: target, versions, backend, check, seconds.
        stages: Snapshots of the graph, for the page; not part of the JSON.
        memory: The live bytes of the lowered graph, for the page; not part of the JSON.
    """

    events: tuple[Event, ...]
    facts: Facts = field(default_factory=Facts)
    stages: tuple[StageSnapshot, ...] = field(default=(), repr=False, compare=False)
    memory: tuple[LiveBytes, ...] = field(default=(), repr=False, compare=False)

    @property
    def fused(self) -> tuple[Lowered, ...]:
        """The quantized ops that were lowered to a kernel, or that a backend claimed."""
        return tuple(e for e in self._of(Lowered) if e.kernel not in NO_KERNELS)

    @property
    def expanded(self) -> tuple[Lowered, ...]:
        """The quantized ops that no kernel accepts; they run as dequantize, float op, quantize."""
        return tuple(e for e in self._of(Lowered) if e.kernel == EXPAND)

    @property
    def in_float(self) -> tuple[Lowered, ...]:
        """The quantized products that run in float by choice, because that is faster."""
        return tuple(e for e in self._of(Lowered) if e.kernel == FLOAT)

    @property
    def refused(self) -> tuple[Lowered, ...]:
        """The ops of ATen that a backend was asked to claim, and refused."""
        return tuple(e for e in self._of(Lowered) if e.kernel == HOST)

    @property
    def claims(self) -> dict[str, str]:
        """What runs each op, by the name of its node: a kernel, a backend, ``float`` or ``expand``.

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
        """The number of ops per kernel or backend; ``float`` and ``expand`` count ops without."""
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

    @property
    def closest_at(self) -> dict[str, Missed]:
        """The rule that came closest in any stage, by the name of the node."""
        return closest(self._of(Missed))

    @property
    def work(self) -> WorkShare | None:
        """The share of the products that runs quantized; ``None`` if there is no product."""
        return work_share(self.events)

    @property
    def actions(self) -> tuple[Action, ...]:
        """What to do, the most expensive first; computed when it is read."""
        return actions_of(self.events)

    def text(self, *, verbose: bool = False, width: int | None = None) -> str:
        """Return the report as text.

        Args:
            verbose: Also the tables: facts, every quantized op with the kernels that lost, what
                was left, and every miss.
            width: Columns; the default is 80, and 120 for the tables.
        """
        # The same text everywhere, whatever the terminal is.
        columns = width or (_WIDE if verbose else COLUMNS)
        console = Console(width=columns, no_color=True, highlight=False)
        with console.capture() as capture:
            console.print(self.renderable(verbose=verbose))
        return capture.get()

    def renderable(self, *, verbose: bool = False) -> RenderableType:
        """Return the report for a `rich` console."""
        return Group(*(render_verbose(self) if verbose else first_screen(self)))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: schema, facts, every event with its kind, and what follows from them.

        ``schema``, ``facts`` and ``events`` are what :meth:`from_json` reads; the others are there
        for tools: ``work``, ``actions``, ``fired`` and ``kernels``.
        """
        work = self.work
        return {
            "schema": SCHEMA,
            "facts": asdict(self.facts),
            "work": None if work is None else {**asdict(work), "share": work.share},
            "actions": [action.to_dict() for action in self.actions],
            "fired": dict(self.fired),
            "kernels": dict(self.kernels),
            "events": [event_data(e) for e in self.events],
        }

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return :meth:`to_dict` as JSON; numbers that are not finite are texts: ``"nan"``."""
        return json.dumps(finite(self.to_dict()), indent=indent, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parse the output of :meth:`to_json`.

        Raises:
            OptionsError: The text is not a report, is damaged, or is of another schema.
        """
        data = read_report(text)
        return cls(data.events, data.facts)

    def to_dataframe(self) -> Any:
        """Return a ``pandas.DataFrame`` with one row per lowered op and per op that was left.

        Raises:
            OptionsError: pandas is not installed.
        """
        return to_frame(self.events)

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

        Raises:
            OptionsError: The file cannot be written, ``profile`` is not a profile, or the model
                has no module of a path in ``sqnr``.
        """
        check_overlays(self, profile, sqnr)
        write_output(path, page_html(self, profile, sqnr))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        del console, options
        yield self.renderable()

    def __str__(self) -> str:
        return self.text()

    def _of(self, kind: type[Any]) -> tuple[Any, ...]:
        return tuple(e for e in self.events if isinstance(e, kind))
