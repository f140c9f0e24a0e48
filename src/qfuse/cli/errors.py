"""How a command prints an error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from qfuse.ir.errors import QfuseError


@contextmanager
def exit_on_error(*others: type[Exception]) -> Iterator[None]:
    """Print a :class:`QfuseError`, or one of ``others``, without a traceback, and exit with 1."""
    kinds: tuple[type[Exception], ...] = (QfuseError, *others)
    try:
        yield
    except kinds as error:
        text = Text.assemble(("error: ", "bold red"), str(error))
        # Whole lines: a path can be copied, and a terminal wraps them itself.
        Console(stderr=True).print(text, soft_wrap=True)
        sys.exit(1)
