"""The command line: ``qfuse compile | explain | doctor | build-kernels``, and plugins."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import click
from rich.logging import RichHandler

import qfuse
from qfuse.cli import saved
from qfuse.cli.analysis import accuracy_command, lint_command
from qfuse.cli.bisect import bisect_command
from qfuse.cli.console import ERR, OUT
from qfuse.cli.errors import exit_on_error
from qfuse.cli.latency import measure_latency
from qfuse.cli.machine import build_kernels_command, doctor_command
from qfuse.cli.options import check_replaceable
from qfuse.cli.pages import PageRequest, measuring_options, page_options
from qfuse.cli.plans import plan_options
from qfuse.cli.plugins import plugin_command, plugin_names
from qfuse.cli.repro import repro_command
from qfuse.cli.request import Request, model_options, read_request, ready_model
from qfuse.ir.errors import StrictError
from qfuse.ir.files import write_output
from qfuse.options import Check
from qfuse.report import Report
from qfuse_command import HELP_NAMES, listed_command
from qfuse_command.diff import diff_command
from qfuse_command.plan import plan_command


class _Group(click.Group):
    """Adds the commands of plugins, and prints qfuse's errors without a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *plugin_names()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        # A plugin cannot replace a command of qfuse.
        return super().get_command(ctx, cmd_name) or plugin_command(cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        with exit_on_error():
            return super().invoke(ctx)


@click.group(cls=_Group, context_settings=HELP_NAMES)
@click.version_option(qfuse.__version__, prog_name="qfuse")
@click.option("-v", "--verbose", is_flag=True, help="show what is logged")
@click.pass_context
def main(ctx: click.Context, verbose: bool) -> None:
    """Compile quantized PyTorch models, and report what was done and why."""
    ctx.with_resource(_logging(logging.INFO if verbose else logging.WARNING))


@contextmanager
def _logging(level: int) -> Iterator[None]:
    """Print qfuse's log to stderr while a command runs, each line once.

    Lines do not propagate to the root logger: handlers of other libraries would repeat them.
    """
    log = logging.getLogger("qfuse")
    before = log.level, log.propagate
    handler = RichHandler(console=ERR, show_path=False)
    log.addHandler(handler)
    log.setLevel(level)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]


@listed_command("compile")
@model_options
@click.option(
    "--check",
    type=click.Choice([c.value for c in Check]),
    default=Check.PIPELINE.value,
    show_default=True,
    help="how values are checked",
)
@click.option("--plan", "show_plan", is_flag=True, help="print the lowered graph")
@click.option("--measure", is_flag=True, help="time kernels and float instead of predicting them")
@measuring_options
@plan_options
@click.option("-o", "--output", metavar="FILE", help="save the compiled model, for `qfuse run`")
def compile_command(
    check: str,
    report_html: str | None,
    lint: bool,
    trace: str | None,
    show_profile: bool,
    output: str | None,
    **given: Any,
) -> None:
    """MODEL is a zoo name, module:factory, file.py:factory, or a .pt2 file."""
    check_replaceable(output, "--output")
    check_replaceable(given["save_plan"], "--save-plan")
    request = read_request(given, check)
    pages = PageRequest.of(report_html, trace, show=show_profile)
    with _reported(request, pages), ready_model(request) as ready:
        args, kwargs = ready.args, ready.kwargs
        with ready.captured(
            lint=lint and pages.html is not None, measure=given["measure"], plan=given["use_plan"]
        ) as captured:
            fast = captured.compile(strict=request.strict)
        # Before it runs: a model may write its buffers.
        if output is not None:
            fast.save(output, args, kwargs)
        ready.say("measuring the source and the compiled model")
        latency = measure_latency(ready.model, fast, args, kwargs)
        profile = pages.measure(fast, args, kwargs, ready.say)
    if output is not None:
        ERR.print(f"saved to {output}", soft_wrap=True, highlight=False)
    if given["save_plan"] is not None:
        fast.plan.save(given["save_plan"])
    facts = replace(
        fast.report.facts,
        source_seconds=latency.source_seconds,
        compiled_seconds=latency.compiled_seconds,
    )
    report = _show(replace(fast.report, facts=facts), request)
    # A JSON report on standard output must stay parsable.
    out = ERR if request.report_json == "-" else OUT
    out.print(str(latency), highlight=False)
    pages.write(report, profile, out)
    if request.show_plan:
        out.print(str(fast.plan), markup=False, highlight=False)


@listed_command("explain")
@model_options
@page_options
def explain_command(report_html: str | None, lint: bool, **given: Any) -> None:
    """MODEL is a zoo name, module:factory, file.py:factory, or a .pt2 file."""
    request = read_request(given, Check.OFF.value)
    pages = PageRequest.of(report_html)
    with (
        _reported(request, pages),
        ready_model(request) as ready,
        ready.captured(lint=lint) as captured,
    ):
        _, report = captured.plan(strict=request.strict)
    pages.write(_show(report, request), None, OUT)


@contextmanager
def _reported(request: Request, pages: PageRequest) -> Iterator[None]:
    """Print and write the report of a model that ``--strict`` refuses too: it says why."""
    try:
        yield
    except StrictError as error:
        out = ERR if request.report_json == "-" else OUT
        pages.write(_show(error.report, request), None, out)
        raise


def _show(report: Report, request: Request) -> Report:
    """Print the report, and return it with the name of the model as it was given."""
    report = replace(report, facts=replace(report.facts, model=request.model))
    if request.report_json == "-":
        click.echo(report.to_json())
        return report
    if request.report_json is not None:
        write_output(request.report_json, report.to_json())
    OUT.print(report.renderable(verbose=request.verbose))
    return report


_COMMANDS = (
    accuracy_command,
    bisect_command,
    build_kernels_command,
    compile_command,
    diff_command,
    doctor_command,
    explain_command,
    lint_command,
    plan_command,
    repro_command,
    *saved.COMMANDS,
)
for _command in _COMMANDS:
    main.add_command(_command)
