"""``qfuse repro``: run a directory that a roll-back left."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from qfuse.cases import rerun_case
from qfuse.ir.errors import CaseError
from qfuse_command import listed_command

_MALFORMED = 2


@listed_command("repro")
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
def repro_command(folder: Path) -> None:
    """The exit code is 1 if it does, 0 if it does not, and 2 if DIR cannot be used.

    torch.export.load reads the model, and may unpickle: run directories of people whom you trust.
    """
    try:
        outcome = rerun_case(folder)
    except CaseError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(_MALFORMED)
    click.echo(str(outcome))
    sys.exit(1 if outcome.reproduces else 0)
