from __future__ import annotations

import errno
import logging
import threading
from pathlib import Path

import filelock
import pytest
from tests.support.locks import refuse_locks

from qfuse.ir.locks import locked


def test_one_at_a_time(tmp_path: Path) -> None:
    held = threading.Event()
    done = threading.Event()

    def hold() -> None:
        with locked(tmp_path / "lock", 10):
            held.set()
            done.wait(10)

    other = threading.Thread(target=hold)
    other.start()
    try:
        assert held.wait(10)
        with pytest.raises(filelock.Timeout), locked(tmp_path / "lock", 0.01):
            pytest.fail("two at a time")
    finally:
        done.set()
        other.join()
    with locked(tmp_path / "lock", 10):
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_network_drive_without_locks(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_locks(monkeypatch, number)
    caplog.set_level(logging.INFO, "qfuse")

    with locked(tmp_path / "lock", 0.01), locked(tmp_path / "lock", 0.01):
        (tmp_path / "work").touch()

    assert (tmp_path / "work").exists()
    assert f"{tmp_path} has no locks" in caplog.text
    assert "processes may do the same work" in caplog.text


def test_what_fails_behind_it_is_not_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_locks(monkeypatch, errno.ENOLCK)

    with pytest.raises(OSError, match="of the work"), locked(tmp_path / "lock", 0.01):
        raise OSError(errno.ENOLCK, "of the work")


def test_another_error_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_locks(monkeypatch, errno.EIO)

    with pytest.raises(OSError, match="no locks here"), locked(tmp_path / "lock", 0.01):
        pytest.fail("it is not held")
