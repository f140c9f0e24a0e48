"""What ends a compiler besides its source is told apart by real processes."""

from __future__ import annotations

import errno
import resource
import subprocess

import pytest

from qfuse.ir.compiler_limits import limit_behind

KILLED = "was killed, as it is where memory runs out"
NO_MEMORY = "ran out of memory"
TOO_LARGE = "is larger than the limit"


def failed(script: str) -> subprocess.CalledProcessError:
    with pytest.raises(subprocess.CalledProcessError) as error:
        subprocess.run(["sh", "-c", script], capture_output=True, check=True)
    return error.value


@pytest.mark.parametrize(
    ("script", "what"),
    [
        ("kill -KILL $$", KILLED),
        ("kill -XFSZ $$", TOO_LARGE),
        ("echo 'g++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1", KILLED),
        ("echo 'g++: internal compiler error: Killed (program cc1plus)' >&2; exit 4", KILLED),
        ("echo 'clang: error: unable to execute command: Killed'; exit 254", KILLED),
        ("echo 'collect2: fatal error: ld terminated with signal 9 [Killed]' >&2; exit 1", KILLED),
        ("exit 137", KILLED),
        ("echo 'cc1plus: out of memory allocating 65536 bytes' >&2; exit 1", NO_MEMORY),
        ("echo 'virtual memory exhausted: Cannot allocate memory' >&2; exit 1", NO_MEMORY),
        ("echo 'g++: fatal error: File size limit exceeded signal terminated'; exit 4", TOO_LARGE),
        ("echo 'ld: final link failed: File too large' >&2; exit 1", TOO_LARGE),
    ],
)
def test_names_the_limit(script: str, what: str) -> None:
    limit = limit_behind(failed(script))
    assert limit is not None
    assert what in limit.what
    assert limit.fix.startswith("raise the limit" if what is TOO_LARGE else "free memory")


@pytest.mark.parametrize(
    "script",
    [
        "exit 1",
        "kill -SEGV $$",
        "echo \"model.cpp:3: error: 'bad_alloc' is not a member of 'std'\" >&2; exit 1",
        "echo 'model.cpp:3: error: Killed was not declared in this scope' >&2; exit 1",
    ],
)
def test_an_error_of_the_compiler_is_not_a_limit(script: str) -> None:
    assert limit_behind(failed(script)) is None


def test_looks_at_causes_and_at_files() -> None:
    error = RuntimeError("C++ compile error")
    error.__cause__ = failed("kill -KILL $$")
    limit = limit_behind(error)
    assert limit is not None
    assert KILLED in limit.what
    written = limit_behind(OSError(errno.EFBIG, "File too large"))
    assert written is not None
    assert TOO_LARGE in written.what
    no_memory = limit_behind(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert no_memory is not None
    assert "could not be started" in no_memory.what
    assert limit_behind(OSError(errno.ENOSPC, "No space left on device")) is None
    assert limit_behind(ValueError("another")) is None


def test_says_how_large_the_limit_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20_000_000, 20_000_000))
    limit = limit_behind(OSError(errno.EFBIG, "File too large"))
    assert limit is not None
    assert "larger than the limit of 20 MB for files" in limit.what
