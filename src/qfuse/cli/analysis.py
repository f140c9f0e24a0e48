"""``qfuse lint`` and ``qfuse accuracy``: what is wrong with a quantization, and what it costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

import qfuse
from qfuse.analysis import Severity
from qfuse.analysis.placement.table import lint_table
from qfuse.cli.console import OUT, show_progress
from qfuse.cli.loading import load_quantized, loading_options
from qfuse.cli.options import check_writable
from qfuse.ir.errors import OptionsError
from qfuse.ir.files import write_output
from qfuse.report.data import finite
from qfuse_command import NO, listed_command


@listed_command("lint")
@loading_options
@click.option("--json", "as_json", is_flag=True, help="print the findings as JSON")
@click.option("--strict", is_flag=True, help="exit with 1 if there are warnings")
def lint_command(as_json: bool, strict: bool, **given: Any) -> None:
    """MODEL is a zoo name, module:factory, file.py:factory, or a .pt2 file."""
    made = load_quantized(**given)
    with show_progress() as say:
        findings = qfuse.lint(made.model, made.args, made.kwargs, progress=say)
    if as_json:
        data = finite([finding.to_dict() for finding in findings])
        click.echo(json.dumps(data, indent=2, allow_nan=False))
    else:
        OUT.print(lint_table(findings))
    if strict and any(finding.severity is Severity.WARNING for finding in findings):
        raise click.exceptions.Exit(NO)


@listed_command("accuracy")
@loading_options
@click.option(
    "--batches",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="how many inputs to compare on; more than one needs a zoo model",
)
@click.option(
    "--keep",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="how many layers to try in float",
)
@click.option(
    "--json", "report_json", metavar="FILE", help="write the numbers as JSON; - is standard output"
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="draw the layers as an SVG image",
)
def accuracy_command(
    batches: int, keep: int, report_json: str | None, plot: Path | None, **given: Any
) -> None:
    """MODEL is a zoo name, module:factory or file.py:factory, in float."""
    check_writable(report_json, "--json")
    check_writable(plot, "--plot")
    if given["quantize"] is None:
        raise OptionsError(
            "the accuracy is that of a quantized model against its float model",
            fix="add --quantize RECIPE, or call qfuse.measure_accuracy from Python",
        )
    made = load_quantized(**given)
    if batches > 1 and made.loaded.zoo is None:
        raise OptionsError(
            f"{given['model']} has one example, so --batches {batches} cannot be drawn",
            fix="call qfuse.measure_accuracy from Python with batches=[...]",
        )
    more = [
        made.loaded.zoo.inputs(seed) for seed in range(1, batches) if made.loaded.zoo is not None
    ]
    with show_progress() as say:
        found = qfuse.measure_accuracy(
            made.model,
            made.loaded.model,
            made.args,
            made.kwargs,
            batches=more,
            keep=keep,
            progress=say,
        )
    if plot is not None:
        found.save_plot(plot)
    if report_json == "-":
        click.echo(found.to_json())
        return
    if report_json is not None:
        write_output(report_json, found.to_json())
    OUT.print(found)
