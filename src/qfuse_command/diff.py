"""``qfuse diff``: compare two reports that were written as JSON, without torch."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import click

from qfuse.ir.errors import OptionsError
from qfuse.report.data import ReportData, finite, read_report
from qfuse.report.diff import FACTOR, diff_reports
from qfuse_command import ERROR, NO, listed_command


@listed_command("diff")
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@click.option(
    "--factor",
    type=click.FloatRange(min=1.0),
    default=FACTOR,
    show_default=True,
    help="how much slower predictions may get",
)
@click.option("--json", "as_json", is_flag=True, help="print the difference as JSON")
def diff_command(before: Path, after: Path, factor: float, as_json: bool) -> None:
    """The exit code is 1 if it is worse, 0 if it is not, and 2 if a report cannot be read."""
    if math.isnan(factor):
        # A range of click has it.
        raise click.BadParameter("nan is not a number to compare with", param_hint="'--factor'")
    try:
        found = diff_reports(_read(before), _read(after), factor)
    except OptionsError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(ERROR)
    if as_json:
        click.echo(json.dumps(finite(found.to_dict()), indent=2, allow_nan=False))
    else:
        click.echo(str(found))
    sys.exit(NO if found.regressions else 0)


def _read(path: Path) -> ReportData:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise OptionsError(
            f"{path} cannot be read: {error.strerror or error}",
            fix="write it with `qfuse explain MODEL --json FILE`",
        ) from error
    try:
        return read_report(text)
    except OptionsError as error:
        raise OptionsError(error.what, where=str(path), fix=error.fix) from error
