"""``python -m qfuse.bench``: measure qfuse against its peers."""

from __future__ import annotations

import sys
from typing import Any

import click
from rich.console import Console

from qfuse.bench.command import options_of
from qfuse.bench.run import BenchOptions, run_bench
from qfuse.ir.errors import QfuseError

__all__ = ["main"]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options_of(BenchOptions)
def main(**given: Any) -> None:
    """Measure models that are quantized alike, by qfuse and by its peers."""
    try:
        run_bench(BenchOptions(**given))
    except QfuseError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
