"""``qfuse bisect``: find the rewrite behind a difference."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import qfuse
from qfuse.cli.options import check_replaceable
from qfuse.cli.request import model_options, read_request, ready_model
from qfuse.ir.errors import OptionsError
from qfuse.options import Check
from qfuse.zoo.user_code import imported
from qfuse_command import NO, listed_command


@listed_command("bisect")
@model_options
@click.option("--atol", type=float, help="absolute tolerance: a greater difference is one")
@click.option("--rtol", type=float, help="relative tolerance, likewise")
@click.option(
    "--predicate",
    metavar="MODULE:FUNCTION",
    help="a function of the result and the expected one that says whether they differ",
)
@click.option(
    "--save-plan",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="write a plan that turns off what was found",
)
def bisect_command(
    atol: float | None,
    rtol: float | None,
    predicate: str | None,
    save_plan: Path | None,
    **given: Any,
) -> None:
    """MODEL is a zoo name, module:factory, file.py:factory, or a .pt2 file.

    The exit code is 1 if it differs, 0 if it does not, and 2 if that cannot be said.
    """
    if (predicate is None) == (rtol is None and atol is None):
        raise OptionsError(
            "give a tolerance or a predicate, which say what a difference is",
            fix="as in --atol 1e-3, --rtol 1e-3, or --predicate module:function",
        )
    check_replaceable(save_plan, "--save-plan")
    differs = None if predicate is None else _function(predicate)
    request = read_request(given, Check.PIPELINE.value)
    with ready_model(request) as ready:
        result = qfuse.bisect(
            ready.model,
            ready.args,
            ready.kwargs,
            differs=differs,
            rtol=rtol,
            atol=atol,
            **ready.settings,
        )
    click.echo(str(result))
    if save_plan is not None:
        if result.plan is None:
            click.echo(f"{save_plan} is not written: no rewrite or kernel is to be off", err=True)
        else:
            result.plan.save(save_plan)
    sys.exit(NO if result.found else 0)


def _function(text: str) -> Callable[[Any, Any], bool]:
    """Import a predicate; modules in the working folder are found, as with ``python -m``."""
    module, _, name = text.rpartition(":")
    fix = "write module:function or file.py:function"
    if not module or not name:
        raise OptionsError(f"--predicate {text!r} is incomplete", fix=fix)
    with imported(module, name, "say whether two results differ") as found:
        if not callable(found):
            raise OptionsError(f"--predicate {text!r} is not a function", fix=fix)
        return found
