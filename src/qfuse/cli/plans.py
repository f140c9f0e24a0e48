"""Options of ``compile`` for saved plans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

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
