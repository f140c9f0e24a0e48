"""Fake results for sizes that vary: this package's only file with private torch API."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher


def infer(op: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], mode: Any) -> Any:
    """Return the fake result of ``op`` in a fake mode.

    Raises:
        RuntimeError: The op takes a size that may vary for the example's.
    """
    with keep_sizes(mode), mode, torch.no_grad():
        return op(*args, **kwargs)


@contextmanager
def keep_sizes(mode: Any) -> Iterator[None]:
    """Call ops on values of a fake mode, or of none, so that sizes that may vary stay symbols.

    Some ops, such as those of ``interpolate``, are composites in C++ that read sizes as numbers,
    and have a decomposition in Python for symbolic ones, which torch.export calls as well.

    Raises:
        RuntimeError: An op fixed a size all the same; that is undone.
    """
    env = None if mode is None else mode.shape_env
    if env is None or not env.var_to_range:
        yield
        return
    before = dict(env.replacements), dict(env.var_to_range), len(env.guards)
    try:
        with enable_python_dispatcher():
            yield
    finally:
        fixed = _undo(env, *before)
    if fixed:
        raise RuntimeError(f"it would fix a size that may vary ({', '.join(fixed)})")


def _undo(
    env: Any, replacements: Mapping[Any, Any], ranges: Mapping[Any, Any], guards: int
) -> list[str]:
    """Make the sizes that became numbers symbols again, and return their names."""
    fixed = [
        symbol
        for symbol, value in env.replacements.items()
        if value.is_number and not replacements.get(symbol, symbol).is_number
    ]
    if fixed:
        env.replacements.clear()
        env.replacements.update(replacements)
        env.var_to_range.update(ranges)
        del env.guards[guards:]
        # What was concluded from them is cached, or the next call would not notice.
        env._replacements_version_counter += 1
        env._version_counter += 1
        env.fake_tensor_cache.clear()
        for method in vars(type(env)).values():
            if hasattr(method, "cache_clear"):
                method.cache_clear()
    return [str(symbol) for symbol in fixed]
