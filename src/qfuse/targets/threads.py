"""How many threads an operator uses, for one thread of the program and without global settings.

The number is a setting of the thread that calls the operator: OpenMP has one, which ATen, Inductor,
oneDNN and qfuse's kernels read, and MKL has another. ``torch.set_num_threads`` changes both, and
besides them the number that all threads begin with.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from qfuse.ir.errors import OptionsError

MOST_THREADS = 4096


def checked_threads(value: object) -> int | None:
    """Return a number of threads that a user gave, ``None`` for torch's.

    Raises:
        OptionsError: It is not a positive number, or this torch does not use OpenMP.
    """
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_THREADS:
        raise OptionsError(
            f"threads must be a number from 1 to {MOST_THREADS}, not {value!r}",
            fix="give None to use torch.get_num_threads()",
        )
    _runtime()
    return value


@contextmanager
def limited_threads(count: int | None) -> Iterator[None]:
    """Context manager: operators that this thread calls use so many threads, ``None`` for torch's.

    Other threads of the program do not notice, and neither do threads that are started within.

    Raises:
        OptionsError: This torch does not use OpenMP.
    """
    if count is None:
        yield
        return
    before = set_threads(count, count)
    try:
        yield
    finally:
        set_threads(*before)


def can_limit_threads() -> bool:
    """Whether :func:`limited_threads` can set a number here: this torch uses OpenMP."""
    try:
        _runtime()
    except OptionsError:
        return False
    return True


def set_threads(openmp: int, mkl: int) -> tuple[int, int]:
    """Set the numbers of this thread, and return those before, to be set again afterwards.

    For code that is called often; others use :func:`limited_threads`.
    """
    # Torch sets the numbers of a thread when they are first read; done later, it would undo this.
    before = torch.get_num_threads()
    runtime = _runtime()
    runtime.openmp(openmp)
    return before, runtime.mkl(mkl)


class _Runtime:
    """The functions of the libraries that this process's torch uses."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.openmp: Any = library.omp_set_num_threads
        self.openmp.restype = None
        # In lower case it is the function for Fortran, which takes a pointer.
        self.mkl: Any = getattr(library, "MKL_Set_Num_Threads_Local", lambda count: count)


@cache
def _runtime() -> _Runtime:
    folder = Path(torch.__file__).parent / "lib"
    try:
        # Also finds the functions of the libraries that it depends on, and no others.
        (path,) = folder.glob("libtorch_cpu.*")
        return _Runtime(ctypes.CDLL(str(path)))
    except (OSError, ValueError, AttributeError) as error:
        raise OptionsError(
            f"threads cannot be set: torch does not use OpenMP here ({error})",
            fix="leave threads out, and call torch.set_num_threads",
        ) from error
