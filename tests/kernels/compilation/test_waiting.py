"""How long a build waits for another one, and for its compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import filelock
import pytest

from qfuse.kernels.compilation import compiler
from qfuse.kernels.compilation.compiler import KernelBuildError, run_compiler
from qfuse.kernels.compilation.waiting import build_lock


def test_a_build_waits_while_the_other_one_gets_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    acquire = filelock.FileLock.acquire

    def acquired(lock: filelock.FileLock, timeout: float) -> Any:
        waits.append(timeout)
        if len(waits) == 3:
            return acquire(lock, timeout)
        (tmp_path / f"{len(waits)}.o").touch()
        raise filelock.Timeout(lock.lock_file)

    monkeypatch.setattr(filelock.FileLock, "acquire", acquired)

    with build_lock(tmp_path / "lock", tmp_path, seconds=7):
        assert waits == [7, 7, 7]


def test_a_build_that_finishes_no_file_is_not_waited_for(tmp_path: Path) -> None:
    lock, objects = tmp_path / "lock", tmp_path / "objects"
    with (
        build_lock(lock, objects, seconds=0.01),
        pytest.raises(KernelBuildError, match="finished no file for 0") as error,
        build_lock(lock, objects, seconds=0.01),
    ):
        raise AssertionError("two processes have the lock")

    assert error.value.where == str(lock)
    assert "is kept" in str(error.value)
    with build_lock(lock, objects, seconds=0.01):
        assert lock.exists()


def test_a_compiler_that_is_killed_is_not_blamed() -> None:
    with pytest.raises(KernelBuildError, match="was killed, as it is where memory") as error:
        run_compiler(["sh", "-c", "kill -KILL $$"])

    assert "free memory" in (error.value.fix or "")


def test_a_compiler_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "build_seconds", lambda: 0.1)

    with pytest.raises(KernelBuildError, match="did not finish") as error:
        run_compiler(["sleep", "60"])

    assert "are kept" in str(error.value)
