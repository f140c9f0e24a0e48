"""Command line options derived from the fields of a dataclass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, get_type_hints

import click

from qfuse.ir.errors import OptionsError
from qfuse.ir.files import replaceable_file

# Of fields whose default is `None`, which does not tell the type.
_NONE_OR = {
    Path | None: (click.Path(path_type=Path, dir_okay=False), "FILE"),
    int | None: (click.IntRange(min=1), "N"),
}


def options_of(kind: type[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds one option per field of a dataclass, unless it is ``api_only``.

    The default and type of a field determine the kind of its option, ``metadata["help"]`` its text.
    An option for a field of type ``tuple[str, ...]`` may be repeated. A field with
    ``metadata["open"]`` also takes values that its type does not list.
    """
    hints = get_type_hints(kind)

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for field in reversed(command_fields(kind)):
            assert field.default is not MISSING, f"option {field.name} has no default"
            hint = str if field.metadata.get("open") else hints[field.name]
            option = _folder_option if field.metadata.get("folder") else _option
            command = option(field.name, field.default, hint, field.metadata["help"])(command)
        return command

    return decorate


def command_fields(kind: type[Any]) -> list[Field[Any]]:
    """Return the fields of a dataclass that are options of a command."""
    return [field for field in fields(kind) if not field.metadata.get("api_only")]


def _folder_option(
    name: str, default: Any, hint: Any, text: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    assert hint == Path | None, f"option {name} is not the path of a folder"
    place = click.Path(path_type=Path, file_okay=False)
    flag = f"--{name.replace('_', '-')}"
    return click.option(flag, type=place, default=default, metavar="FOLDER", help=text)


def _option(
    name: str, default: Any, hint: Any, text: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    flag = f"--{name.replace('_', '-')}"
    # Before other types: a bool is an int in Python.
    if isinstance(default, bool):
        return click.option(f"{flag}/--no-{flag[2:]}", default=default, help=text)
    if isinstance(default, tuple):
        return click.option(flag, multiple=True, default=default, metavar="NAME", help=text)
    if isinstance(default, StrEnum) and hint is str:
        names = "|".join([*type(default), "NAME"])
        return click.option(
            flag, type=str, default=default.value, metavar=names, show_default=True, help=text
        )
    if isinstance(default, StrEnum):
        choice = click.Choice([member.value for member in type(default)])
        return click.option(flag, type=choice, default=default.value, show_default=True, help=text)
    if default is None and hint in _NONE_OR:
        kind, metavar = _NONE_OR[hint]
        return click.option(flag, type=kind, default=default, metavar=metavar, help=text)
    shown = default is not None
    return click.option(flag, type=type(default), default=default, show_default=shown, help=text)


def check_writable(target: str | Path | None, option: str) -> None:
    """Refuse a file that cannot be written, before the compilation starts."""
    if target is None or (target, option) == ("-", "--json"):
        return
    if str(target) == "-":
        raise OptionsError(
            f"{option} cannot write to standard output, for which - stands: only --json can",
            fix="give the path of a file",
        )
    path = Path(str(target))
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else "lies in a folder that does not exist"
        raise OptionsError(f"{option} {target} {what}", fix="give the path of a file")


def check_replaceable(target: str | Path | None, option: str) -> None:
    """Refuse a file that cannot be replaced, before the compilation starts."""
    check_writable(target, option)
    if target is not None:
        replaceable_file(target)
