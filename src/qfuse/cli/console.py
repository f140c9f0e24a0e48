"""The consoles of the commands, and the step that is shown while one runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

OUT = Console()
ERR = Console(stderr=True)


def _say_lines() -> Callable[[str], None]:
    """Return a function that prints each step with the seconds since the start."""
    begin = time.monotonic()

    def say(step: str) -> None:
        # Through click, which knows the stream of a test, and flushed: a log is read meanwhile.
        click.echo(f"{time.monotonic() - begin:5.0f} s  {step}", err=True)

    return say


@contextmanager
def show_progress() -> Iterator[Callable[[str], None]]:
    """Show the current step and its time on stderr: one line per step if it is not a terminal."""
    if not ERR.is_terminal:
        yield _say_lines()
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=ERR, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def say(step: str) -> None:
            bar.update(task, description=step)

        yield say
