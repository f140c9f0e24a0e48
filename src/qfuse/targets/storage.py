"""Where qfuse keeps what it can make again, and how files get there in one piece."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import platformdirs

CACHE_VARIABLE = "QFUSE_CACHE_DIR"


def cache_directory() -> Path:
    """The folder of qfuse's caches: ``$QFUSE_CACHE_DIR``, or the user's cache folder.

    It is not created here.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    return (
        Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("qfuse", False))
    )


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old one or the new one, never a part.

    Raises:
        OSError: The folder cannot be made or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
