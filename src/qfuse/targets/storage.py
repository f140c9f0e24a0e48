"""The cache folder, and atomic writes to it."""

from __future__ import annotations

import os
import tempfile
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
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(path)
    except BaseException:
        # Also on KeyboardInterrupt: no half-written file stays behind.
        Path(temporary).unlink(missing_ok=True)
        raise
