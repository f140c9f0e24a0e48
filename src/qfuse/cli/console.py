"""The consoles of the commands, and the step that is shown while one runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

OUT = Console()
ERR = Console(stderr=True)


@contextmanager
def show_progress() -> Iterator[Callable[[str], None]]:
    """Show the current step and its time on stderr."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    # A console that is no terminal would get an empty line.
    hidden = not ERR.is_terminal
    with Progress(*columns, console=ERR, transient=True, disable=hidden) as bar:
        task = bar.add_task("starting", total=None)

        def say(step: str) -> None:
            bar.update(task, description=step)

        yield say
