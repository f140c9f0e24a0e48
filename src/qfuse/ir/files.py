"""Files that the user asks for: an error names what is missing, and no folder is made."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from qfuse.ir.errors import ModelFileError, OptionsError, QfuseError
from qfuse.ir.words import a_kind

_MOST_LINKS = 40
"""As many as Linux follows."""

_NAME_FILE = "name a file in a folder of your own"
_FIX = "make the folder first, or give a path in one that exists"


def path_of(given: object, kind: type[QfuseError] = OptionsError) -> Path:
    """Return the path that a user gave.

    Raises:
        QfuseError: Of the class ``kind``: it is not a path.
    """
    if isinstance(given, (str, os.PathLike)):
        path = os.fspath(given)
        if isinstance(path, str) and "\0" not in path:
            return Path(path)
    raise kind(
        f"the path of a file is a str or a pathlib.Path, not {a_kind(given)}",
        fix='give its name, as in "model.qfuse"' if kind is ModelFileError else "give its name",
    )


def check_folder(path: str | Path, kind: type[QfuseError] = OptionsError) -> None:
    """Refuse a path of which the folder does not exist, or that is a folder.

    Args:
        path: The file to write.
        kind: The class of the error.

    Raises:
        QfuseError: Of the class ``kind``.
    """
    file = path_of(path, kind)
    folder = file.absolute().parent
    # Not `is_dir` of the path: it raises if the name is too long, which the write tells.
    if os.path.isdir(file):  # noqa: PTH112
        raise kind("it cannot be written: it is a folder", where=str(file), fix="name a file in it")
    if not folder.is_dir():
        raise kind(f"it cannot be written: there is no folder {folder}", where=str(file), fix=_FIX)


def replaceable_file(path: str | Path, kind: type[QfuseError] = OptionsError) -> Path:
    """Return the file that is to be replaced for a write to ``path``: links are followed.

    For files that are written beside their place and moved there: a move onto a link replaces the
    link, and root would replace a device.

    Args:
        path: The file to write.
        kind: The class of the error.

    Raises:
        QfuseError: Of the class ``kind``: :func:`check_folder` refuses the file, or it is a device
            or a pipe, or a link leads to one.
    """
    check_folder(path, kind)
    file = Path(path)
    for links in range(_MOST_LINKS):
        # Step by step: a link to /dev/stdout is refused, wherever that leads in turn.
        file = Path(os.path.realpath(file.parent)) / file.name
        # Not those of `Path`, which raise if the name is too long.
        link = os.path.islink(file)  # noqa: PTH114
        regular = link or not os.path.exists(file) or os.path.isfile(file)  # noqa: PTH110, PTH113
        if _is_of_system(file) or not regular:
            it = f"it leads to {file}," if links else "it is"
            raise kind(
                f"it cannot be written: {it} a device, a pipe or a file of the system",
                where=str(path),
                fix=_NAME_FILE,
            )
        if not link:
            check_folder(file, kind)
            return file
        file = file.parent / file.readlink()
    raise kind("it cannot be written: its links lead in a circle", where=str(path), fix=_NAME_FILE)


def _is_of_system(file: Path) -> bool:
    # /dev/shm is a file system in memory, for anyone's files.
    in_memory = file.is_relative_to("/dev/shm")
    return file.is_relative_to("/proc") or (file.is_relative_to("/dev") and not in_memory)


def write_output(path: str | Path, text: str) -> None:
    """Write a text file; an existing one is replaced.

    Raises:
        OptionsError: Its folder does not exist, or it cannot be written.
    """
    check_folder(path)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritable(error, path) from error


def unwritable(error: OSError, path: str | Path) -> OptionsError:
    """Return the error for a file that cannot be written, for a reason of the system."""
    return OptionsError(
        f"it cannot be written: {error.strerror or error}",
        where=str(path),
        fix="give a path in a folder that you may write to",
    )


def parse_json(text: str | bytes) -> Any:
    """Return the data of a JSON text.

    Raises:
        ValueError: It is not JSON, or nested so deeply that Python cannot read it.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its lists and objects are nested too deeply") from error
