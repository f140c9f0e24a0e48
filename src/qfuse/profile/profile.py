"""The profile of a model: the time of each op, with what it was predicted to take."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from qfuse.cost import CostProfile, bytes_text, rate_text, seconds_text
from qfuse.ir.files import write_output
from qfuse.profile.memory import LiveBytes
from qfuse.profile.trace import Span, chrome_trace
from qfuse.profile.work import OpWork

_MOST_ROWS = 12
_WIDTH = 80
# A run that takes less than this part of the median shows that others were interrupted.
_DISTURBED = 0.7


@dataclass(frozen=True, slots=True)
class OpTime:
    """One op that ran: a kernel with the views and loops that belong to it, or an op of ATen.

    Attributes:
        name: Name of its main node in the lowered graph.
        nodes: Names of all its nodes.
        op: What runs, such as ``qfuse.linear_w8a8``.
        site: Name of the node of the optimized graph that it implements, or "".
        module: Path of its module, or "".
        source: The user's line, or "".
        nanoseconds: The least of its measured times.
        work: Its work and predicted time; ``None`` if there is no model of it.
    """

    name: str
    nodes: tuple[str, ...]
    op: str
    site: str
    module: str
    source: str
    nanoseconds: int
    work: OpWork | None

    @property
    def seconds(self) -> float:
        """The measured time."""
        return self.nanoseconds * 1e-9

    @property
    def predicted(self) -> float | None:
        """The predicted time in seconds, if there is a model of the op."""
        return None if self.work is None else self.work.predicted

    @property
    def roofline_share(self) -> float | None:
        """The time that the hardware needs at least, over the measured time.

        It exceeds 1 if weights stay in a cache between two runs, since weights count as read from
        memory.
        """
        return None if self.work is None else self.work.roofline / max(self.seconds, 1e-9)

    @property
    def bytes_per_second(self) -> float | None:
        """The bytes that it reads and writes, over the measured time."""
        return None if self.work is None else self.work.bytes / max(self.seconds, 1e-9)

    @property
    def operations_per_second(self) -> float | None:
        """Its multiplications and additions over the measured time."""
        return None if self.work is None else self.work.operations / max(self.seconds, 1e-9)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, with units in the names."""
        work = self.work
        return {
            "name": self.name,
            "nodes": list(self.nodes),
            "op": self.op,
            "site": self.site,
            "module": self.module,
            "source": self.source,
            "measured_us": self.nanoseconds / 1e3,
            "predicted_us": None if work is None else _digits(work.predicted * 1e6),
            "gb_per_s": _digits(_scaled(self.bytes_per_second)),
            "gop_per_s": _digits(_scaled(self.operations_per_second)),
            "roofline_share": _digits(self.roofline_share),
        }


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured and predicted time of every op of a model.

    ``print(profile)`` shows it in 80 columns, :meth:`to_dict` returns it as data.

    Attributes:
        ops: In the order in which they run.
        compiled_nanoseconds: The median time of the compiled model as a whole.
        compiled_least_nanoseconds: The least of these times. Other programs that run make it much
            less than the median, because they interrupt a long run more often than a short op.
        backend: What ran it as a whole: ``aoti``, ``eager``, or the names of backends.
        rounds: How often everything was measured.
        machine: The speeds that predictions and shares of the roofline are relative to.
        memory: The live bytes at each node.
    """

    ops: tuple[OpTime, ...]
    compiled_nanoseconds: int
    compiled_least_nanoseconds: int
    backend: str
    rounds: int
    machine: CostProfile
    memory: tuple[LiveBytes, ...]

    @property
    def nanoseconds(self) -> int:
        """The sum of the measured times of the ops."""
        return sum(op.nanoseconds for op in self.ops)

    @property
    def is_disturbed(self) -> bool:
        """Whether the compiled model took very different times, as when other programs run."""
        return self.compiled_least_nanoseconds < _DISTURBED * self.compiled_nanoseconds

    @property
    def peak_bytes(self) -> int:
        """The most bytes that the values of the graph need at a time."""
        return max((point.during for point in self.memory), default=0)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, with units in the names."""
        return {
            "backend": self.backend,
            "rounds": self.rounds,
            "ops_total_us": self.nanoseconds / 1e3,
            "compiled_us": self.compiled_nanoseconds / 1e3,
            "compiled_least_us": self.compiled_least_nanoseconds / 1e3,
            "peak_bytes": self.peak_bytes,
            "machine": str(self.machine.machine),
            "ops": [op.to_dict() for op in self.ops],
            "memory": [[point.node, point.during, point.after] for point in self.memory],
        }

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return :meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def to_chrome_trace(self) -> dict[str, Any]:
        """Return a trace for Perfetto or ``chrome://tracing``: measured, predicted, memory."""
        spans = [Span(op.name, op.op, op.nodes, op.nanoseconds, op.predicted) for op in self.ops]
        return chrome_trace(spans, self.memory)

    def save_chrome_trace(self, path: str | Path) -> None:
        """Write :meth:`to_chrome_trace` to a file.

        Raises:
            OptionsError: The file cannot be written.
        """
        write_output(path, json.dumps(self.to_chrome_trace()))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        del console, options
        yield from self._render()

    def __str__(self) -> str:
        console = Console(width=_WIDTH, no_color=True, highlight=False)
        with console.capture() as capture:
            console.print(self)
        return capture.get()

    def _render(self) -> Iterator[Any]:
        title = "Microseconds per op, measured and predicted"
        table = Table(title=title, title_justify="left", width=_WIDTH, box=box.SIMPLE_HEAD)
        table.add_column("op", overflow="ellipsis", no_wrap=True, ratio=3)
        table.add_column("module", overflow="ellipsis", no_wrap=True, ratio=2)
        for name in ("us", "pred.", "GB/s", "GOP/s", "roof"):
            table.add_column(name, justify="right", no_wrap=True)
        slowest = sorted(self.ops, key=lambda op: -op.nanoseconds)
        for op in slowest[:_MOST_ROWS]:
            table.add_row(*_row(op))
        rest = slowest[_MOST_ROWS:]
        if rest:
            taken = sum(op.nanoseconds for op in rest)
            table.add_row(f"{len(rest)} more", "", _microseconds(taken * 1e-9), style="dim")
        yield table
        total, compiled = self.nanoseconds * 1e-9, self.compiled_nanoseconds * 1e-9
        yield Text(
            f"op by op {seconds_text(total)} (least of {self.rounds} runs each); as a whole, by "
            f"{self.backend}: {seconds_text(compiled)} (median)"
        )
        if self.is_disturbed:
            least = seconds_text(self.compiled_least_nanoseconds * 1e-9)
            yield Text(f"the machine is busy: as a whole it took {least} at best", "yellow")
        yield Text(
            f"values of the graph need up to {bytes_text(self.peak_bytes)}; the machine reads "
            f"{rate_text(self.machine.memory_bandwidth)} and computes "
            f"{rate_text(self.machine.int8_ops, 'OP')} in int8"
        )
        if not any(op.work is not None for op in self.ops):
            yield Text("no op has a model of its work, so there is no roofline", "dim")


def _row(op: OpTime) -> list[str]:
    predicted, share = op.predicted, op.roofline_share
    rate, operations = _scaled(op.bytes_per_second), _scaled(op.operations_per_second)
    return [
        escape(op.op),
        # The end of a path tells layers apart.
        escape(".".join(op.module.split(".")[-2:])),
        _microseconds(op.seconds),
        "" if predicted is None else _microseconds(predicted),
        "" if rate is None else f"{rate:.1f}",
        "" if not operations else f"{operations:.0f}",
        "" if share is None else f"{share:.0%}",
    ]


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}" if seconds < 1e-5 else f"{seconds * 1e6:.0f}"  # noqa: PLR2004


def _scaled(per_second: float | None) -> float | None:
    return None if per_second is None else per_second / 1e9


def _digits(value: float | None) -> float | None:
    """Return four significant digits."""
    return None if value is None else float(f"{value:.4g}")
