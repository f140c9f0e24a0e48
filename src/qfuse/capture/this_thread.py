"""Replace functions of torch for a while, with another effect in this thread than in others."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

Replacement = Callable[..., Any]
"""Takes the function that was replaced, and the arguments of a call of it."""


class _Names(threading.local):
    """The names of what is replaced by this thread."""

    def __init__(self) -> None:
        self.names: set[str] = set()


_replaced_here = _Names()


def call_original(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call what was replaced: a :data:`Replacement` without an effect."""
    return original(*args, **kwargs)


@contextmanager
def replaced(
    owner: object, name: str, *, here: Replacement, elsewhere: Replacement
) -> Iterator[None]:
    """Replace ``owner.name``.

    Args:
        owner: A module or a class.
        name: The name of its function.
        here: What calls in this thread do.
        elsewhere: What calls in other threads do.
    """
    plain = getattr(owner, name)
    # What was replaced first, if another thread is here too.
    original = getattr(plain, "qfuse_replaced", plain)
    names = _replaced_here.names
    nested = name in names

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        effect = here if name in _replaced_here.names else elsewhere
        return effect(original, *args, **kwargs)

    # Of a decorated function, as it is: what it wraps.
    vars(call).update(vars(original), qfuse_replaced=original)
    names.add(name)
    setattr(owner, name, call)
    try:
        yield
    finally:
        if not nested:
            names.discard(name)
        # If another thread is still here, its calls have no effect from now on.
        setattr(owner, name, plain if nested else original)


@contextmanager
def own_annotations() -> Iterator[None]:
    """Keep calls of other threads out of a trace.

    While a model is exported, each call of a function that Dynamo does not trace, such as one that
    ``torch.compile`` has compiled, is noted in a dictionary of the process. Those of other threads
    would be in the trace, and fail with a KeyError if the trace replaces the dictionary meanwhile.
    """

    def skip(*_args: object, **_kwargs: object) -> AbstractContextManager[None]:
        return nullcontext()

    with replaced(torch.fx.traceback, "annotate", here=call_original, elsewhere=skip):
        yield
