"""Commands and options for saved plans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from qfuse.plans import diff_plans, read_plan

_FILE = click.Path(path_type=Path, dir_okay=False)


def plan_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of ``compile`` that save and replay a plan."""
    save = click.option(
        "--save-plan", type=_FILE, metavar="FILE", help="write rewrites and kernels as JSON"
    )
    replay = click.option(
        "--use-plan", type=_FILE, metavar="FILE", help="replay a saved plan, with its edits"
    )
    return replay(save(command))


@click.group("plan")
def plan_command() -> None:
    """Work with plans that `qfuse compile --save-plan` wrote."""


@plan_command.command("diff")
@click.argument("one", type=_FILE)
@click.argument("other", type=_FILE)
@click.pass_context
def plan_diff_command(ctx: click.Context, one: Path, other: Path) -> None:
    """Print how plan OTHER differs from plan ONE; the exit code is 1 if it does."""
    lines = diff_plans(read_plan(one), read_plan(other))
    for line in lines or ["the plans make the same decisions"]:
        click.echo(line)
    ctx.exit(1 if lines else 0)
