"""Ops of the compiled library as Python functions with the arguments of their schemas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import torch
from torch._ops import OpOverload

from qfuse.ir.graph.schema import argument_names

R = TypeVar("R")


class KernelOp(Generic[R]):
    """An op of the compiled library. Calling it calls the op.

    The C++ schema is the only list of its arguments: they are passed by position or by name, and
    those with a default may be omitted. An ``output``, a
    :class:`~qfuse.kernels.rowwise.RowwiseOutput`, expands to the arguments that it names.

    Args:
        name: Its name in ``torch.ops.qfuse``.
        fake: Returns the fake result from the arguments by name, or raises InputError.
        defaults: Values of optional arguments.
        like: Arguments that default to another argument, or to its dtype.
        complete: Fills in arguments that are derived from others.
        positional: Those that may be passed by position; by default all of the schema's.
    """

    def __init__(
        self,
        name: str,
        fake: Callable[[Any], R],
        *,
        defaults: Mapping[str, object] | None = None,
        like: Mapping[str, str] | None = None,
        complete: Callable[[dict[str, Any]], None] | None = None,
        positional: Sequence[str] = (),
    ) -> None:
        self.name = name
        self._fake = fake
        self._defaults = dict(defaults or {})
        self._like = dict(like or {})
        self._complete = complete
        self._positional = tuple(positional)
        self._names: tuple[str, ...] = ()

    @property
    def overload(self) -> OpOverload:
        """The op; the library must have been loaded."""
        op: OpOverload = getattr(torch.ops.qfuse, self.name).default
        return op

    def __call__(self, *args: Any, **given: Any) -> R:
        """Call the op.

        Raises:
            TypeError: An argument is missing, passed twice, or not in the schema.
            RuntimeError: An argument is invalid; the message names it. While tracing, errors that
                are visible in shapes and dtypes raise InputError.
        """
        op = self.overload
        # Not in `__init__`: the schema exists once the library is loaded.
        self._names = self._names or argument_names(op)
        result: R = op(*self._bind(args, given))
        return result

    def register_fake(self) -> None:
        """Register the fake kernel; the library must have been loaded."""
        self._names = argument_names(self.overload)

        def fake(*args: Any, **given: Any) -> R:
            # The dispatcher omits trailing arguments and passes keyword-only ones by name.
            named = dict(zip(self._names, args, strict=False))
            return self._fake(SimpleNamespace(**named, **given))

        torch.library.register_fake(f"qfuse::{self.name}", fake)

    def _bind(self, args: tuple[Any, ...], given: dict[str, Any]) -> list[Any]:
        """Return the arguments in the order of the schema."""
        order = self._positional or self._names
        if len(args) > len(order):
            raise TypeError(f"{self.name}: {len(args)} arguments are given by position")
        positional = dict(zip(order, args, strict=False))
        twice = sorted(positional.keys() & given.keys())
        if twice:
            raise TypeError(f"{self.name}: {twice} are given by position and by name")
        values = {**self._defaults, **positional, **given}
        # Not an argument of the schema, but a name for several of them.
        output = values.pop("output", None)
        if output is not None:
            values.update(output.named())
        for name, other in self._like.items():
            # An explicit `None` means the default too.
            if values.get(name) is None:
                value = values.get(other)
                values[name] = value.dtype if isinstance(value, torch.Tensor) else value
        if self._complete is not None:
            self._complete(values)
        missing = [name for name in self._names if name not in values]
        if missing or len(values) > len(self._names):
            unknown = sorted(values.keys() - set(self._names))
            raise TypeError(f"{self.name}: missing arguments {missing}, unknown ones {unknown}")
        return [values[name] for name in self._names]
