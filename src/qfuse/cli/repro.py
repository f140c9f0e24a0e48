"""``qfuse repro``: run a directory that a roll-back left."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from qfuse.cases import rerun_case
from qfuse_command import NO, listed_command


@listed_command("repro")
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
def repro_command(folder: Path) -> None:
    """The exit code is 1 if it does, 0 if it does not, and 2 if DIR cannot be used.

    torch.export.load reads the model, and may unpickle: run directories of people whom you trust.
    """
    outcome = rerun_case(folder)
    click.echo(str(outcome))
    sys.exit(NO if outcome.reproduces else 0)
