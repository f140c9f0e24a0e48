"""Plugin commands: one entry point of the group ``qfuse.commands`` per command."""

from __future__ import annotations

import logging
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import click

from qfuse.cli.saved import bench_saved_command
from qfuse.ir.errors import QfuseError
from qfuse.saving import is_model_file
from qfuse_command import APART

GROUP = "qfuse.commands"

_log = logging.getLogger(__name__)


def plugin_names() -> list[str]:
    """Return the names of the plugin commands, including known ones that are not installed."""
    return sorted({*APART, *_installed()})


def plugin_command(name: str) -> click.Command | None:
    """Return the plugin command ``name``, or ``None`` if there is none.

    Running a known command whose package is not installed prints how to install it.
    """
    entry = _installed().get(name)
    if entry is None:
        return _missing(name) if name in APART else None
    command = entry.load()
    if not isinstance(command, click.Command):
        _log.warning("%s is not a click command: the entry point is ignored", entry.value)
        return None
    return command


def _installed() -> dict[str, EntryPoint]:
    # Entry points are only listed here; loading one imports its package.
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _missing(name: str) -> click.Command:
    def run(arguments: tuple[str, ...]) -> None:
        # A saved model is measured without that package.
        if name == "bench" and arguments and is_model_file(Path(arguments[0])):
            bench_saved_command.main(list(arguments), standalone_mode=False)
            return
        raise QfuseError(
            f"`qfuse {name}` is in the package qfuse-bench, which is not installed",
            fix="in a checkout of qfuse: pip install ./benchmarks",
        )

    rest = click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)
    # Whatever the user passes, the answer is how to install the package.
    settings = {"ignore_unknown_options": True}
    return click.Command(name, settings, run, [rest], help=APART[name], short_help=APART[name])
