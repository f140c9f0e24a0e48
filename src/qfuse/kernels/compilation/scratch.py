"""Temporary folders that do not outlive their process, not even a killed one for long."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_STALE_SECONDS = 60
"""A folder of this age is locked, unless its process ended."""


@contextmanager
def scratch_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Context manager of a new temporary folder, which is removed at the end.

    The folder is locked as long as it is used. Folders of the same prefix that are not locked were
    left by killed processes, and are removed first.

    Args:
        prefix: How its name begins; it must end with a character that no other prefix has there.
        parent: The folder that it is created in, by default that for temporary files.

    Raises:
        OSError: The folder cannot be created.
    """
    place = Path(tempfile.gettempdir()) if parent is None else parent
    _remove_stale(place, prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
    handle = os.open(folder, os.O_RDONLY)
    try:
        # Some network drives do not have locks. Their folders are not removed by others then.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(handle)
        shutil.rmtree(folder, ignore_errors=True)


def _remove_stale(place: Path, prefix: str) -> None:
    for folder in place.glob(f"{prefix}*"):
        # Other users may own it, and other processes may remove it.
        with suppress(OSError):
            # Between its creation and its lock.
            if time.time() - folder.stat().st_mtime < _STALE_SECONDS:
                continue
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)
