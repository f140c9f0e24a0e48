"""Fake results for sizes that vary: this package's only file with private torch API."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves


class FixedSizeError(RuntimeError):
    """An op would fix a size that may vary."""


def infer(op: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], mode: Any) -> Any:
    """Return the fake result of ``op`` in a fake mode.

    Raises:
        FixedSizeError: The op takes a size that may vary for the example's.
    """
    with keep_sizes(tree_leaves((args, kwargs))), mode, torch.no_grad():
        return op(*args, **kwargs)


@contextmanager
def keep_sizes(values: Sequence[Any]) -> Iterator[None]:
    """Call ops on values as torch.export does, so that sizes that may vary stay symbols.

    Some ops, such as those of ``interpolate``, are composites in C++ that read sizes as numbers,
    and have a decomposition in Python for symbolic ones.

    Raises:
        FixedSizeError: An op fixed a size all the same; that is undone.
    """
    env = next((value.fake_mode.shape_env for value in values if _is_symbolic(value)), None)
    if env is None:
        yield
        return
    replacements, ranges = dict(env.replacements), dict(env.var_to_range)
    with enable_python_dispatcher():
        yield
    fixed = [s for s, v in env.replacements.items() if v.is_number and s not in replacements]
    if fixed:
        env.replacements.clear()
        env.replacements.update(replacements)
        env.var_to_range.update(ranges)
        # Forgets what was concluded from the size.
        env._update_version_counter()
        names = ", ".join(map(str, fixed))
        raise FixedSizeError(f"it would fix a size that may vary ({names})")


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, FakeTensor):
        return bool(value._has_symbolic_sizes_strides)
    return False
