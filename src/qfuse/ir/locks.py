"""Locks across processes, in folders that several processes write to."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

_log = logging.getLogger(__name__)
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}


@contextmanager
def locked(path: Path, seconds: float) -> Iterator[None]:
    """Context manager that holds a lock, so that of several processes one does the work.

    Some network drives have no locks. There it is not held: processes may do the same work at the
    same time, so what they write has to appear at once, by a rename.

    Args:
        path: The file of the lock.
        seconds: How long to wait for another process.

    Raises:
        OSError: The file cannot be created; ``filelock.Timeout``: another process holds the lock.
    """
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=seconds)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _log.info("%s has no locks (%s): processes may do the same work", path.parent, error)
        yield
        return
    try:
        yield
    finally:
        lock.release()
