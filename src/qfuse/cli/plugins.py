"""Commands that other packages add: an entry point of the group ``qfuse.commands`` for each."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

import click

from qfuse.ir.errors import QfuseError

GROUP = "qfuse.commands"

_log = logging.getLogger(__name__)
# Commands of qfuse's own benchmark package, which is not part of the wheel.
_KNOWN: Mapping[str, str] = MappingProxyType(
    {
        "bench": "measure qfuse against its peers (needs the package qfuse-bench)",
        "demo": "quantize and compile a sentence encoder (needs the package qfuse-bench)",
    }
)


def plugin_names() -> list[str]:
    """Return the names of the commands of other packages, with those that can be installed."""
    return sorted({*_KNOWN, *_installed()})


def plugin_command(name: str) -> click.Command | None:
    """Return a command of another package; ``None`` if no package has one of this name.

    A known command whose package is not installed says how to install it when it is run.
    """
    entry = _installed().get(name)
    if entry is None:
        return _missing(name) if name in _KNOWN else None
    command = entry.load()
    if not isinstance(command, click.Command):
        _log.warning("%s is not a click command: the entry point is ignored", entry.value)
        return None
    return command


def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _missing(name: str) -> click.Command:
    def run(**_: Any) -> None:
        raise QfuseError(
            f"`qfuse {name}` is in the package qfuse-bench, which is not installed",
            fix="in a checkout of qfuse: pip install ./benchmarks",
        )

    rest = click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)
    settings = {"ignore_unknown_options": True}
    return click.Command(name, settings, run, [rest], help=_KNOWN[name], short_help=_KNOWN[name])
