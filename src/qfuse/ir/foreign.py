"""Calls of code of other packages; an error names whose code failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from qfuse.ir.errors import USER_CODE_ERRORS, ExtensionError, QfuseError

T = TypeVar("T")


def call_foreign(
    function: Callable[..., T],
    *args: object,
    what: str,
    fix: str,
    on: object = "",
    where: str | None = None,
    kind: type[QfuseError] = ExtensionError,
) -> T:
    """Call a function of another package.

    Args:
        function: The function.
        *args: Its arguments.
        what: The function in words, for the message, as "is_legal of the backend 'mine'".
        fix: What to do if it fails.
        on: The op that it was called for, if there is one.
        where: The location in the graph, if there is one.
        kind: The type of the error.

    Raises:
        QfuseError: The function fails: an error of ``kind``, which names it and has the failure as
            its cause. An error of qfuse that it raises on purpose is passed on.
    """
    try:
        return function(*args)
    except QfuseError:
        raise
    except USER_CODE_ERRORS as error:
        op = f" for {on}" if on else ""
        raise kind(f"{what} failed{op}: {error!r}", where=where, fix=fix) from error


def list_foreign(function: Callable[[], Iterable[T]], *, what: str, fix: str) -> list[T]:
    """Return what a function of another package returns or generates, as a list.

    Raises:
        ExtensionError: The function fails, or returns something else than several objects.
    """
    made: Any = call_foreign(function, what=what, fix=fix)
    if not isinstance(made, Iterable):
        raise ExtensionError(f"{what} returned {made!r}", fix=fix)
    # A generator runs only now.
    return call_foreign(list, made, what=what, fix=fix)
