"""How a command prints an error, and the status that it exits with."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.text import Text

from qfuse.ir.errors import QfuseError, StrictError
from qfuse_command import ERROR, INTERRUPTED, NO


@contextmanager
def exit_on_error(*others: type[Exception]) -> Iterator[None]:
    """Print a :class:`QfuseError`, or one of ``others``, without a traceback, and exit with 2.

    A status of 1 is an answer, as ``qfuse bisect`` and ``--strict`` give it. An interrupted command
    has none: it exits with 130.
    """
    kinds: tuple[type[Exception], ...] = (QfuseError, *others)
    try:
        yield
    except kinds as error:
        text = Text.assemble(("error: ", "bold red"), str(error))
        # Whole lines: a path can be copied, and a terminal wraps them itself.
        Console(stderr=True).print(text, soft_wrap=True)
        sys.exit(NO if isinstance(error, StrictError) else ERROR)
    except KeyboardInterrupt:
        # click would exit with 1.
        click.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)
