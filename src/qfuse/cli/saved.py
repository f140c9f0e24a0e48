"""Commands for files of compiled models: ``qfuse run | verify``, and ``bench`` of a file."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import click
import torch
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import load_file

import qfuse
from qfuse.cli.console import OUT
from qfuse.ir.errors import OptionsError
from qfuse.ir.signature._tree_api import named_leaves
from qfuse.saving import call_of, digest_of, digests_of
from qfuse_command import NO, listed_command

_WARM_CALLS = 3
_LEAST_CALLS = 10
_SECONDS = 3.0
_PATH = click.Path(path_type=Path, dir_okay=False)


def _file_options(command: Any) -> Any:
    inputs = click.option(
        "--inputs",
        type=_PATH,
        metavar="FILE",
        help="inputs by name in a .safetensors file, instead of those stored",
    )
    return click.argument("file", type=_PATH)(inputs(command))


@listed_command("run")
@_file_options
@click.option("--json", "as_json", is_flag=True, help="print the results as JSON")
def run_command(file: Path, inputs: Path | None, as_json: bool) -> None:
    """FILE is what `qfuse compile -o FILE` or `model.save(FILE)` wrote."""
    model = qfuse.load(file)
    args, kwargs = _call(model, inputs)
    rows = [_described(name, value) for name, value in named_leaves(model(*args, **kwargs))]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    table = Table("result", "type", "shape", "sha256", title=str(file), title_justify="left")
    for row in rows:
        table.add_row(row["name"], row["dtype"], str(row["shape"]), row["sha256"][:16])
    OUT.print(table)


@listed_command("verify")
@_file_options
@click.option("--json", "as_json", is_flag=True, help="print the digests as JSON")
def verify_command(file: Path, inputs: Path | None, as_json: bool) -> None:
    """The exit code is 1 if they differ, 0 if they are equal, and 2 if FILE cannot be used."""
    model = qfuse.load(file)
    found = digests_of(model, *_call(model, inputs))
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        for name, digest in found.items():
            click.echo(f"{digest}  {name}")
        equal = "equal" if len(set(found.values())) == 1 else "not equal"
        click.echo(f"{len(found)} path{'s' * (len(found) != 1)}, {equal}")
    if len(set(found.values())) > 1:
        sys.exit(NO)


@click.command("bench")
@_file_options
@click.option(
    "--threads",
    metavar="N",
    type=click.IntRange(min=0),
    default=0,
    help="threads of a call, 1 or more; by default torch's, as with 0",
)
def bench_saved_command(file: Path, inputs: Path | None, threads: int) -> None:
    """Measure the latency of a saved model."""
    bench_saved(file, inputs, threads=threads)


def bench_saved(file: Path, inputs: Path | None = None, *, threads: int = 0) -> None:
    """Measure the latency of a saved model, and print median and 90th percentile.

    Args:
        file: The model.
        inputs: A file with inputs, instead of those stored.
        threads: Threads of a call; 0 takes torch's default.

    Raises:
        ModelFileError: The file cannot be loaded.
        OptionsError: There are no inputs.
    """
    begin = time.perf_counter()
    model = qfuse.load(file, threads=threads or None)
    loaded = time.perf_counter() - begin
    args, kwargs = _call(model, inputs)
    times = _measured(model, args, kwargs)
    deciles = statistics.quantiles(times, n=10)
    table = Table(show_header=False, title=str(file), title_justify="left")
    table.add_row("median", _milliseconds(statistics.median(times)))
    table.add_row("90th percentile", _milliseconds(deciles[-1]))
    table.add_row("fastest", _milliseconds(min(times)))
    table.add_row("calls", str(len(times)))
    table.add_row("threads", str(threads or torch.get_num_threads()))
    table.add_row("load of the machine", f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    table.add_row("loaded in", _milliseconds(loaded))
    table.add_row("backend", model.backend)
    OUT.print(table)


def _measured(model: Any, args: Any, kwargs: Any) -> list[float]:
    """Return the seconds of each call, without those of the first ones."""
    for _ in range(_WARM_CALLS):
        model(*args, **kwargs)
    times: list[float] = []
    end = time.perf_counter() + _SECONDS
    while len(times) < _LEAST_CALLS or time.perf_counter() < end:
        begin = time.perf_counter()
        model(*args, **kwargs)
        times.append(time.perf_counter() - begin)
    return times


def _call(model: qfuse.CompiledModel, file: Path | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call: the stored ones, or those of a file."""
    specs = [spec for spec in model.signature.inputs if spec.dtype is not None]
    stored = model.example_tensors
    if file is None:
        if stored is None:
            raise OptionsError(
                "the file has no example inputs",
                fix="give --inputs FILE, or save the model with inputs: save(path, args, kwargs)",
            )
        return call_of(model.signature, stored)
    given = _read(file)
    names = [spec.name for spec in specs]
    unknown = sorted(set(given) - set(names))
    missing = [] if stored is not None else sorted(set(names) - set(given))
    if unknown or missing:
        what = f"has {unknown[0]!r}, which is not an input" if unknown else f"lacks {missing[0]!r}"
        raise OptionsError(
            f"{file.name} {what}", where=str(file), fix=f"the inputs are {', '.join(names)}"
        )
    known = {**dict(zip(names, stored or (), strict=False)), **given}
    return call_of(model.signature, tuple(known[name] for name in names))


def _read(file: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise OptionsError(
            f"the inputs cannot be read: {error}",
            where=str(file),
            fix="write them with safetensors.torch.save_file",
        ) from error


def _described(name: str, value: Any) -> dict[str, Any]:
    tensor = isinstance(value, torch.Tensor)
    return {
        "name": name or "result",
        "dtype": str(value.dtype).removeprefix("torch.") if tensor else type(value).__name__,
        "shape": list(value.shape) if tensor else repr(value),
        "sha256": digest_of([value]),
    }


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


COMMANDS = (run_command, verify_command)
