"""Backends of installed packages, and their selection by an option.

A package adds a backend with an entry point::

    [project.entry-points."qfuse.backends"]
    mine = "my_package:backend"

where ``my_package.backend`` is a :class:`~qfuse.backends.backend.Backend` of that name.
"""

from __future__ import annotations

from qfuse.backends.backend import Backend
from qfuse.extensions import (
    OWN,
    Group,
    check_unique,
    extension_names,
    extension_origins,
    load_extension,
)
from qfuse.ir.errors import ExtensionError, OptionsError
from qfuse.options import BuiltinBackend


def chosen_backends(option: object) -> tuple[Backend, ...]:
    """Return the backends of an option, first choice first; none for a built-in one.

    Args:
        option: The value of ``Options.backend``.

    Raises:
        ExtensionError: A package is broken, or two have backends of one name.
        OptionsError: Two of the backends have the same name, or there is none of a name.
    """
    origins = extension_origins(Group.BACKENDS)
    check_unique({str(name): OWN for name in BuiltinBackend}, origins.items(), "backend")
    if isinstance(option, BuiltinBackend):
        return ()
    parts = option if isinstance(option, tuple) else (option,)
    found = tuple(_named(part) if isinstance(part, str) else _checked(part) for part in parts)
    names = [backend.name for backend in found]
    if len(set(names)) < len(names):
        raise OptionsError(f"backend names {', '.join(names)}", fix="name each backend once")
    return found


def _named(name: str) -> Backend:
    found = load_extension(Group.BACKENDS, name, Backend)  # type: ignore[type-abstract]
    if found is None:
        installed = ", ".join(extension_names(Group.BACKENDS)) or "none"
        raise OptionsError(f"there is no backend {name!r}", fix=f"installed are: {installed}")
    if found.value.name != name:
        raise ExtensionError(
            f"the backend {found.value.name!r} of {found.origin} has the entry point {name!r}",
            fix="give both the same name",
        )
    return found.value


def _checked(backend: object) -> Backend:
    if not isinstance(backend, Backend):
        raise OptionsError(
            f"backend={backend!r} is not a qfuse.backends.Backend", fix="derive its class from that"
        )
    return backend
