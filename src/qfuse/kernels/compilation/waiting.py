"""The lock of a build, for which other processes wait as long as it gets on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import filelock

from qfuse.ir.locks import locked
from qfuse.kernels.compilation.compiler import KernelBuildError


@contextmanager
def build_lock(path: Path, objects: Path, *, seconds: float) -> Iterator[None]:
    """Hold the lock of a build.

    A build takes as long as all its files, and several times that on a busy machine.

    Args:
        path: The lock.
        objects: The folder in which the process that holds it puts its object files.
        seconds: How long to wait for the next of them.

    Raises:
        KernelBuildError: The process that holds the lock finished no file for that long.
        OSError: The file cannot be used.
    """
    with ExitStack() as held:
        while True:
            before = _finished(objects)
            try:
                held.enter_context(locked(path, seconds))
            except filelock.Timeout as error:
                if _finished(objects) == before:
                    raise KernelBuildError(
                        f"another process is compiling the kernels, and finished no file for "
                        f"{seconds:g} s",
                        where=str(path),
                        fix="end that process if it hangs, and try again: what it compiled is kept",
                    ) from error
            else:
                break
        yield


def _finished(objects: Path) -> frozenset[str]:
    return frozenset(file.name for file in objects.glob("*.o"))
