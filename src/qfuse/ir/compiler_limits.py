"""What ends a compiler besides errors in its source: a signal, or a limit of the process."""

from __future__ import annotations

import errno
import re
import resource
import signal
import subprocess
from dataclasses import dataclass

# Bounds the walk along the causes of an error.
_CAUSES = 8
# What the driver of g++ or clang says of a program that it started. A compiler that is refused
# memory says so itself; one that is killed says nothing.
_KILLED = re.compile(
    r"\bKilled signal terminated|signal 9 \[Killed\]|\bKilled \(program|execute command: Killed"
)
_NO_MEMORY = re.compile(
    r"^(?!.*: error:).*(out of memory|memory exhausted|cannot allocate memory|bad_alloc)",
    re.IGNORECASE | re.MULTILINE,
)
_TOO_LARGE = re.compile(r"file size limit exceeded|file too large", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class CompilerLimit:
    """Why a compiler did not finish that had nothing to say against its source.

    Attributes:
        what: What happened.
        fix: What to do.
    """

    what: str
    fix: str


def limit_behind(error: BaseException) -> CompilerLimit | None:
    """Return the limit that ended a compiler, or a write for it; ``None`` if it was none.

    Args:
        error: An error of ``subprocess`` or of a file, or one that such an error caused.
    """
    found: BaseException | None = error
    for _ in range(_CAUSES):
        if found is None:
            return None
        limit = _limit_of(found)
        if limit is not None:
            return limit
        found = found.__cause__ or found.__context__
    return None


def _limit_of(error: BaseException) -> CompilerLimit | None:
    if isinstance(error, OSError):
        return _of_system(error)
    if not isinstance(error, subprocess.CalledProcessError):
        return None
    said = f"{_text(error.stdout)}\n{_text(error.stderr)}"
    if error.returncode == -signal.SIGXFSZ or _TOO_LARGE.search(said):
        return _file_size()
    # A shell that started the compiler adds 128.
    if error.returncode in {-signal.SIGKILL, 128 + signal.SIGKILL} or _KILLED.search(said):
        return _memory("the C++ compiler was killed, as it is where memory runs out")
    if _NO_MEMORY.search(said):
        return _memory("the C++ compiler ran out of memory")
    return None


def _of_system(error: OSError) -> CompilerLimit | None:
    if error.errno in {errno.ENOMEM, errno.EAGAIN}:
        return _memory("the C++ compiler could not be started for want of memory or processes")
    return _file_size() if error.errno == errno.EFBIG else None


def _memory(what: str) -> CompilerLimit:
    return CompilerLimit(what, "free memory, or raise the limit of the container, and try again")


def _file_size() -> CompilerLimit:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    size = "" if limit == resource.RLIM_INFINITY else f" of {limit / 1e6:.3g} MB"
    return CompilerLimit(
        f"a file for the C++ compiler is larger than the limit{size} for files of this process",
        "raise the limit where the process is started: ulimit -f unlimited",
    )


def _text(said: str | bytes | None) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else said or ""
