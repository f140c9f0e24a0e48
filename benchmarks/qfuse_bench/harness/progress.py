"""Progress display."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)


class Watch(Protocol):
    """Receives the start and end of steps."""

    def say(self, what: str) -> None:
        """Something begins."""

    def advance(self) -> None:
        """One step is over."""


class Silent:
    """Ignores all progress."""

    def say(self, what: str) -> None:
        """Drop it."""

    def advance(self) -> None:
        """Drop it."""


class _Bar:
    def __init__(self, progress: Progress, steps: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=steps)

    def say(self, what: str) -> None:
        self._progress.update(self._task, description=what)

    def advance(self) -> None:
        self._progress.advance(self._task)


@contextmanager
def watching(console: Console, steps: int) -> Iterator[Watch]:
    """Show a bar of so many steps; it goes away when the block ends.

    If the output is not a terminal, steps are printed as lines instead.
    """
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (
        SpinnerColumn(),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bar(progress, steps)


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, what: str) -> None:
        self._console.print(f"... {what}", style="dim", markup=False, highlight=False)

    def advance(self) -> None:
        pass
