"""Errors of libraries that mean that there is not enough memory."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from qfuse.ir.errors import USER_CODE_ERRORS, OutOfMemoryError, QfuseError

# torch's allocator for CPUs raises a plain RuntimeError.
_TEXTS = ("can't allocate memory", "cannot allocate memory", "not enough memory")
# Bounds the walk along the causes of an error.
_CAUSES = 8


@contextmanager
def out_of_memory_errors(doing: str) -> Iterator[None]:
    """Context manager that raises an error of its own where memory was short.

    Args:
        doing: What it was needed for, as in "memory ran out while {doing}".

    Raises:
        OutOfMemoryError: An error of the block, or a cause of it, says that memory ran out.
    """
    try:
        yield
    except (*USER_CODE_ERRORS, MemoryError, QfuseError) as error:
        found = None if isinstance(error, OutOfMemoryError) else shortage_of(error)
        if found is None:
            raise
        line = str(found).strip().partition("\n")[0] or type(found).__name__
        raise OutOfMemoryError(
            f"memory ran out while {doing}: {line}",
            fix="free memory; free_source=True and check='off' need less of it",
        ) from error


def shortage_of(error: BaseException) -> BaseException | None:
    """Return the error that says that memory ran out, among ``error`` and its causes."""
    found: BaseException | None = error
    for _ in range(_CAUSES):
        if found is None or _is_shortage(found):
            return found
        found = found.__cause__ or found.__context__
    return None


def _is_shortage(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(each in text for each in _TEXTS)
