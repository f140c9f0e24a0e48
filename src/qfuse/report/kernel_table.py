"""A table of the compiled kernels."""

from __future__ import annotations

import platform

import torch
from rich.table import Table

from qfuse.kernels import KernelLibrary, read_description


def kernel_table(library: KernelLibrary) -> Table:
    """Return a table of the library's path, compiler, platform and instruction sets."""
    table = Table(title="qfuse kernels", title_justify="left", show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    if library.path is not None:
        how = "compiled now" if library.compiled else "cached"
        size = library.path.stat().st_size / 1e6
        table.add_row("library", f"{library.path} ({size:.1f} MB, {how})")
        table.add_row("compiler", read_description(library.path).compiler)
    machine = f"{platform.system()} {platform.machine()}"
    table.add_row("built for", f"torch {torch.__version__}, {machine}")
    table.add_row("instruction sets", ", ".join(library.instruction_sets))
    table.add_row("used by default", library.default)
    return table
