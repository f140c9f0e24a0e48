"""``qfuse doctor`` and ``qfuse build-kernels``: what this machine has."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from qfuse import kernels
from qfuse.cli.bundle import bundle_options, show_bundle
from qfuse.cli.console import OUT, show_progress
from qfuse.cli.loading import load_quantized
from qfuse.cli.preflight import explained, show_preflight
from qfuse.ir.errors import QfuseError
from qfuse.report.kernel_table import kernel_table
from qfuse.targets import Target, diagnose
from qfuse.zoo import recipes
from qfuse_command import listed_command


@listed_command("doctor")
@click.argument("model", required=False)
@click.option("--quantize", type=click.Choice(recipes.names()), help="quantize MODEL first")
@click.option("--size", "sizes", multiple=True, metavar="NAME=VALUE", help="a size of MODEL")
@click.option("--json", "as_json", is_flag=True, help="print the findings as JSON")
@bundle_options
def doctor_command(
    model: str | None,
    quantize: str | None,
    sizes: Sequence[str],
    as_json: bool,
    bundle: Path | None,
    report: Path | None,
) -> None:
    """With MODEL, show what costs that model time here."""
    if bundle is not None or report is not None:
        show_bundle(bundle, report)
        return
    if model is not None:
        made = load_quantized(model, quantize, None, sizes)
        explain = explained(made.model, made.args, dict(made.kwargs), None)
        show_preflight(explain, OUT, as_json=as_json)
        return
    findings = diagnose(Target.detect())
    if as_json:
        click.echo(json.dumps([asdict(f) for f in findings], indent=2, default=str))
        return
    # Rows of the whole width: in a column of a table the names of ops would be split.
    table = Table.grid("", "", padding=(0, 1, 0, 0))
    style = {"ok": "green", "warn": "yellow", "bad": "red"}
    for finding in findings:
        level = str(finding.level)
        text = Text.assemble((finding.what, "bold"), f": {finding.detail}")
        table.add_row(Text(level, style[level]), text)
        if finding.fix:
            table.add_row("", Text(f"do: {finding.fix}", "green"))
    OUT.print(table)


@listed_command("build-kernels")
@click.option(
    "--all", "every", is_flag=True, help="also those of other instruction sets than this machine's"
)
@click.option(
    "--into",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="build all, and copy them into a folder, for a wheel that contains them",
)
def build_kernels_command(into: Path | None, *, every: bool) -> None:
    """They are kept in the cache folder, and every process loads them from there."""
    with show_progress() as say:
        say("looking for compiled kernels")
        library = kernels.load(say)
        every = every or into is not None
        others = kernels.build_every_path(say) if every and library.available else []
    if not library.available:
        # No ``fix``: the reason already says what to do, which depends on the failure.
        raise QfuseError(f"the kernels could not be built: {library.reason}")
    copied = None
    if into is not None and library.path is not None:
        copied = kernels.copy_library(library.path, into)
        for path in others:
            kernels.copy_library(path, into)
    OUT.print(kernel_table(library))
    if copied is not None:
        OUT.print(f"copied to: {copied}", soft_wrap=True)
