"""The command line: ``qfuse compile | explain | doctor | build-kernels``, and plugins."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import qfuse
from qfuse import kernels
from qfuse.cli import saved
from qfuse.cli.analysis import accuracy_command, lint_command
from qfuse.cli.bundle import bundle_options, show_bundle
from qfuse.cli.diff import diff_command
from qfuse.cli.errors import exit_on_error
from qfuse.cli.latency import measure_latency
from qfuse.cli.options import check_writable, options_of
from qfuse.cli.pages import PageRequest, measuring_options, page_options
from qfuse.cli.plans import plan_command, plan_options
from qfuse.cli.plugins import plugin_command, plugin_names
from qfuse.cli.preflight import explained, show_preflight
from qfuse.cli.repro import repro_command
from qfuse.ir.errors import OptionsError, QfuseError
from qfuse.ir.quant.spec import parse_dtype
from qfuse.options import Check, Options, choice
from qfuse.report import Report
from qfuse.report.kernel_table import kernel_table
from qfuse.targets import Target, diagnose
from qfuse.zoo import recipes
from qfuse.zoo.resolve import Loaded, load_model

_OUT = Console()
_ERR = Console(stderr=True)
_FLOATS = {"float32": None, "bfloat16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Request:
    """The request of a ``compile`` or ``explain`` command.

    Attributes:
        model: A zoo name, ``module:factory``, or a ``.pt2`` file.
        quantize: Recipe to quantize with first, or ``None``.
        group_size: Weights per scale, or ``None`` for the recipe's default.
        sizes: Sizes of the model, as text.
        dynamic: Whether the sizes that the model declares dynamic stay dynamic.
        check: How values are checked.
        float_dtype: ``bfloat16``, or ``None`` for the model's own dtypes.
        report_json: Where to write the report as JSON; ``-`` is standard output.
        show_plan: Whether to print the lowered graph.
        verbose: Whether to print all tables of the report.
        strict: Whether a quantized op that runs in float is an error.
        options: All other options.
    """

    model: str
    quantize: str | None
    group_size: int | None
    sizes: dict[str, str]
    dynamic: bool
    check: Check
    float_dtype: str | None
    report_json: str | None
    show_plan: bool
    verbose: bool
    strict: bool
    options: Options


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


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(qfuse.__version__, prog_name="qfuse")
@click.option("-v", "--verbose", is_flag=True, help="show what is logged")
@click.pass_context
def main(ctx: click.Context, verbose: bool) -> None:
    """Compile quantized PyTorch models, and report what was done and why."""
    ctx.with_resource(_logging(logging.INFO if verbose else logging.WARNING))


main.add_command(lint_command)
main.add_command(accuracy_command)


@contextmanager
def _logging(level: int) -> Iterator[None]:
    """Print qfuse's log to stderr while a command runs, each line once.

    Lines do not propagate to the root logger: handlers of other libraries would repeat them.
    """
    log = logging.getLogger("qfuse")
    before = log.level, log.propagate
    handler = RichHandler(console=_ERR, show_path=False)
    log.addHandler(handler)
    log.setLevel(level)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]


def _model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that ``compile`` and ``explain`` share."""
    options = (
        click.argument("model"),
        click.option(
            "--quantize", type=click.Choice(recipes.names()), help="quantize with torchao first"
        ),
        click.option("--group-size", type=int, help="weights per scale; -1: a whole channel"),
        click.option(
            "--size", "sizes", multiple=True, metavar="NAME=VALUE", help="a size of the model"
        ),
        click.option(
            "--dynamic/--static",
            default=False,
            show_default=True,
            help="keep the sizes dynamic that the model declares so",
        ),
        click.option(
            "--float-dtype",
            type=click.Choice(list(_FLOATS)),
            default="float32",
            show_default=True,
            help="dtype of unquantized ops; bfloat16 is lossy",
        ),
        click.option("--json", "report_json", metavar="FILE", help="write the report as JSON"),
        click.option("--strict", is_flag=True, help="fail if a quantized op runs in float"),
        click.option("--verbose", is_flag=True, help="print all tables of the report"),
        options_of(Options),
    )
    # Decorators apply from the last to the first, and help lists options in the order of adding.
    for option in reversed(options):
        command = option(command)
    return command


@main.command("compile")
@_model_options
@click.option(
    "--check",
    type=click.Choice([c.value for c in Check]),
    default=Check.PIPELINE.value,
    show_default=True,
    help="how values are checked",
)
@click.option("--plan", "show_plan", is_flag=True, help="print the lowered graph")
@measuring_options
@plan_options
@click.option("-o", "--output", metavar="FILE", help="save the compiled model, for `qfuse run`")
def compile_command(
    check: str,
    report_html: str | None,
    trace: str | None,
    show_profile: bool,
    output: str | None,
    **given: Any,
) -> None:
    """Compile MODEL (a zoo name, module:factory, or a .pt2 file), measure it, and report."""
    check_writable(output, "--output")
    request = _request(given, check)
    pages = PageRequest.of(report_html, trace, show=show_profile)
    loaded = load_model(request.model, request.sizes)
    with _progress() as say:
        model, args, kwargs, shapes = _prepare(request, loaded, say)
        fast = qfuse.compile(
            model,
            args,
            kwargs,
            dynamic_shapes=shapes,
            check=request.check.value,
            float_dtype=_float_dtype(request),
            options=request.options,
            progress=say,
            strict=request.strict,
            plan=given["use_plan"],
        )
        # Before it runs: a model may write its buffers.
        if output is not None:
            fast.save(output, args, kwargs)
        say("measuring the source and the compiled model")
        latency = measure_latency(model, fast, args, kwargs)
        profile = pages.measure(fast, args, kwargs, say)
    if output is not None:
        _ERR.print(f"saved to {output}", soft_wrap=True, highlight=False)
    if given["save_plan"] is not None:
        fast.plan.save(given["save_plan"])
    facts = replace(
        fast.report.facts,
        source_seconds=latency.source_seconds,
        compiled_seconds=latency.compiled_seconds,
    )
    report = _show(replace(fast.report, facts=facts), request)
    # A JSON report on standard output must stay parsable.
    out = _ERR if request.report_json == "-" else _OUT
    out.print(str(latency), highlight=False)
    pages.write(report, profile, out)
    if request.show_plan:
        out.print(str(fast.plan), markup=False, highlight=False)


@main.command("explain")
@_model_options
@page_options
def explain_command(report_html: str | None, **given: Any) -> None:
    """Print the report of compiling MODEL, without compiling or running it."""
    request = _request(given, Check.OFF.value)
    pages = PageRequest.of(report_html)
    loaded = load_model(request.model, request.sizes)
    with _progress() as say:
        model, args, kwargs, shapes = _prepare(request, loaded, say)
        report = qfuse.explain(
            model,
            args,
            kwargs,
            dynamic_shapes=shapes,
            float_dtype=_float_dtype(request),
            options=request.options,
            progress=say,
            strict=request.strict,
        )
    pages.write(_show(report, request), None, _OUT)


@main.command("doctor")
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
    """Show what this machine supports, what would silently not fuse, and how to fix it.

    With MODEL, show what costs that model time here.
    """
    if bundle is not None or report is not None:
        show_bundle(bundle, report)
        return
    if model is not None:
        loaded = load_model(model, parse_size_options(sizes))
        made = loaded.model, loaded.args, dict(loaded.kwargs or {})
        source, args, kwargs = quantize_loaded(loaded, quantize, None) if quantize else made
        show_preflight(explained(source, args, kwargs, None), _OUT, as_json=as_json)
        return
    findings = diagnose(Target.detect())
    if as_json:
        click.echo(json.dumps([asdict(f) for f in findings], indent=2, default=str))
        return
    table = Table(title="qfuse doctor", title_justify="left")
    for column in ("", "what", "what was seen", "what to do"):
        table.add_column(column, overflow="fold")
    style = {"ok": "green", "warn": "yellow", "bad": "red"}
    for finding in findings:
        level = str(finding.level)
        mark = f"[{style[level]}]{level}[/]"
        table.add_row(mark, finding.what, finding.detail, finding.fix)
    _OUT.print(table)


main.add_command(diff_command)


@main.command("build-kernels")
@click.option(
    "--into",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="also copy them into a folder, to build a wheel that contains them",
)
def build_kernels_command(into: Path | None) -> None:
    """Compile qfuse's own kernels for this machine, ahead of the first use."""
    with _progress() as say:
        say("compiling the kernels (about a minute)")
        library = kernels.load()
    if not library.available:
        # No ``fix``: the reason already says what to do, which depends on the failure.
        raise QfuseError(f"the kernels could not be built: {library.reason}")
    copied = None
    if into is not None and library.path is not None:
        copied = kernels.copy_library(library.path, into)
    _OUT.print(kernel_table(library))
    if copied is not None:
        _OUT.print(f"copied to: {copied}", soft_wrap=True)


for _command in (plan_command, repro_command, *saved.COMMANDS):
    main.add_command(_command)


def _request(given: dict[str, Any], check: str) -> Request:
    """Validate all options before any slow step."""
    options = Options.of({f.name: given[f.name] for f in fields(Options)})
    check_writable(given["report_json"], "--json")
    return Request(
        given["model"],
        given["quantize"],
        given["group_size"],
        parse_size_options(given["sizes"]),
        given["dynamic"],
        choice(Check, check, "check"),
        _FLOATS[given["float_dtype"]],
        given["report_json"],
        given.get("show_plan", False),
        given["verbose"],
        given["strict"],
        options,
    )


def parse_size_options(texts: Sequence[str]) -> dict[str, str]:
    """Parse the sizes of a model from texts of the form ``NAME=VALUE``."""
    sizes: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise OptionsError(f"--size {text!r} is not NAME=VALUE", fix="as in --size layers=2")
        sizes[name] = value
    return sizes


def _prepare(
    request: Request, loaded: Loaded, say: Callable[[str], None]
) -> tuple[Any, tuple[Any, ...], dict[str, Any], Any]:
    """Return the arguments of :func:`qfuse.compile`: model, inputs, dynamic shapes."""
    args, kwargs = loaded.args, dict(loaded.kwargs or {})
    shapes = loaded.dynamic_shapes if request.dynamic else None
    if request.dynamic and loaded.dynamic_shapes is None:
        raise OptionsError(
            f"{request.model} does not declare dynamic sizes",
            fix="compile it from Python with dynamic_shapes=..., or use larger example sizes",
        )
    if request.quantize is None:
        if request.group_size is not None:
            raise OptionsError("--group-size needs --quantize", fix="add --quantize, as in w4a8")
        return loaded.model, args, kwargs, shapes
    say(f"quantizing with {request.quantize}")
    return *quantize_loaded(loaded, request.quantize, shapes, request.group_size), shapes


def quantize_loaded(
    loaded: Loaded, recipe: str, shapes: Any, group_size: int | None = None
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Quantize a model, print what was skipped, and return the model with its inputs."""
    if isinstance(loaded.model, torch.export.ExportedProgram):
        raise OptionsError(
            "an exported program cannot be quantized",
            where=loaded.spec,
            fix="leave out --quantize, or quantize the module before exporting it",
        )
    args, kwargs = loaded.args, dict(loaded.kwargs or {})
    quantized = recipes.quantize(
        loaded.model, recipe, args, kwargs, dynamic_shapes=shapes, group_size=group_size
    )
    for note in quantized.notes:
        _ERR.print(f"not quantized: {note}", style="yellow", markup=False)
    return quantized.model, args, kwargs


def _show(report: Report, request: Request) -> Report:
    """Print the report, and return it with the name of the model as it was given."""
    report = replace(report, facts=replace(report.facts, model=request.model))
    if request.report_json == "-":
        click.echo(report.to_json())
        return report
    if request.report_json is not None:
        Path(request.report_json).write_text(report.to_json(), encoding="utf-8")
    _OUT.print(report.renderable(verbose=request.verbose))
    return report


def _float_dtype(request: Request) -> torch.dtype | None:
    return None if request.float_dtype is None else parse_dtype(request.float_dtype)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show the current step and its time on stderr."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    # A console that is no terminal would get an empty line.
    hidden = not _ERR.is_terminal
    with Progress(*columns, console=_ERR, transient=True, disable=hidden) as bar:
        task = bar.add_task("starting", total=None)

        def say(step: str) -> None:
            bar.update(task, description=step)

        yield say
