"""``qfuse plan diff``: compare two plans that were saved as JSON, without torch."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from qfuse.ir.errors import QfuseError
from qfuse.plans.diff import diff_plans
from qfuse.plans.read import read_plan
from qfuse_command import COMMANDS, ERROR, HELP_NAMES, NO

_FILE = click.Path(path_type=Path, dir_okay=False)

plan_command = click.Group("plan", help=COMMANDS["plan"], context_settings=HELP_NAMES)


@plan_command.command("diff")
@click.argument("one", type=_FILE)
@click.argument("other", type=_FILE)
def plan_diff_command(one: Path, other: Path) -> None:
    """Print how plan OTHER differs from plan ONE.

    The exit code is 1 if it does, 0 if it does not, and 2 if a plan cannot be read.
    """
    try:
        lines = diff_plans(read_plan(one), read_plan(other))
    except QfuseError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(ERROR)
    for line in lines or ["the plans make the same decisions"]:
        click.echo(line)
    sys.exit(NO if lines else 0)
