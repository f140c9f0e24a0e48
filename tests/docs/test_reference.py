"""The reference pages name everything that there is: codes, events, options, models, kernels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qfuse import kernels, zoo
from qfuse.cli import main
from qfuse.ir import events
from qfuse.ir.events import Event, MissCode
from qfuse.lower.kernels.registry import all_kernels
from qfuse.options import Check

DOCS = Path(__file__).parents[2] / "docs"


def first_cells(page: str) -> set[str]:
    """What stands in code marks in the first column of the tables of a page."""
    rows = re.findall(r"^\| ([^|]*) \|", (DOCS / page).read_text(), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]*)`", row)}


def test_every_miss_code_and_event_is_explained() -> None:
    kinds = {
        value.__name__.lower()
        for value in vars(events).values()
        if isinstance(value, type) and issubclass(value, Event) and value is not Event
    }
    assert first_cells("report.md") == kinds | set(MissCode)


@pytest.mark.parametrize("name", ["compile", "explain"])
def test_every_option_is_explained(name: str) -> None:
    text = (DOCS / "cli.md").read_text()
    options = [
        flag
        for option in main.commands[name].params
        for flag in (*option.opts, *option.secondary_opts)
        if flag.startswith("--")
    ]
    assert [flag for flag in options if flag not in text] == []


def test_every_command_model_and_check_is_explained() -> None:
    text = (DOCS / "cli.md").read_text()
    assert [name for name in main.commands if f"qfuse {name} " not in text] == []
    assert [name for name in zoo.names() if f"`{name}`" not in text] == []
    exactness = (DOCS / "exactness.md").read_text()
    assert [check for check in Check if f'"{check}"' not in exactness] == []


def test_every_kernel_has_its_row() -> None:
    library = kernels.KernelLibrary(available=False, reason="not needed here")
    assert first_cells("kernels.md") == {kernel.name for kernel in all_kernels(library)}
