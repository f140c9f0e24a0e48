"""File systems without locks."""

from __future__ import annotations

import fcntl

import pytest


def refuse_locks(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let every lock of a file fail, as on a network drive.

    Args:
        monkeypatch: Undoes it.
        number: The number of the error.
    """

    def refuse(_handle: object, operation: int) -> None:
        if not operation & fcntl.LOCK_UN:
            raise OSError(number, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
