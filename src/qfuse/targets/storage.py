"""The cache folder, and atomic writes to it."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import platformdirs

CACHE_VARIABLE = "QFUSE_CACHE_DIR"


def cache_directory() -> Path:
    """Return the folder of qfuse's caches: ``$QFUSE_CACHE_DIR``, or the user's cache folder.

    It is not created here.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    return (
        Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("qfuse", False))
    )


def write_atomically(path: Path, text: str) -> None:
    """Write a text file atomically: other processes see the old or the new content.

    Raises:
        OSError: The folder cannot be created or written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, since a rename is atomic within one file system only.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    # `mkstemp` would make a file that only its owner can read.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except BaseException:
        # Also on KeyboardInterrupt: no half-written file stays behind.
        temporary.unlink(missing_ok=True)
        raise
