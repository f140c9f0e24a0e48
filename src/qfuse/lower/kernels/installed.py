"""Kernels that installed packages add to the registry.

A package adds kernels with an entry point::

    [project.entry-points."qfuse.kernels"]
    mine = "my_package:kernels"

where ``my_package.kernels`` is a function that returns new
:class:`~qfuse.lower.select.kernel.Kernel` objects. It is called once per lowering, since kernels
may cache what they packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from qfuse.extensions import OWN, Extension, Group, check_unique, load_extensions
from qfuse.ir.errors import ExtensionError
from qfuse.ir.foreign import list_foreign
from qfuse.lower.select.kernel import Kernel

MakeKernels = Callable[[], Sequence[Kernel[Any]]]
"""Returns new kernels for one lowering."""

_FIX = "name a function without arguments that returns new kernels"

_PARTS = ("name", "covers", "supported", "accepts", "emit")


def installed_kernels(own: Iterable[Kernel[Any]]) -> tuple[MakeKernels, ...]:
    """Load the kernels of installed packages, in the order of the names of their entry points.

    Args:
        own: qfuse's kernels, whose names must not be used again.

    Raises:
        ExtensionError: An entry point is broken, gives something that is not a kernel, or a kernel
            has the name of another one.
    """
    found = load_extensions(Group.KERNELS, object)
    names = ((name, extension.origin) for extension in found for name in _names(extension))
    check_unique(dict.fromkeys((kernel.name for kernel in own), OWN), names, "kernel")
    made: list[Any] = [extension.value for extension in found]
    return tuple(made)


def _names(extension: Extension[object]) -> list[str]:
    where = f"the set of kernels {extension.name!r} of {extension.origin}"
    if not callable(extension.value):
        raise ExtensionError(f"{where} is {extension.value!r}, not a function", fix=_FIX)
    names: list[str] = []
    for kernel in list_foreign(extension.value, what=where, fix=_FIX):
        lacking = [part for part in _PARTS if not hasattr(kernel, part)]
        if lacking:
            raise ExtensionError(
                f"{where} gives {kernel!r}, which has no {lacking[0]!r}",
                fix="implement qfuse.lower.select.kernel.Kernel",
            )
        names.append(kernel.name)
    return names
