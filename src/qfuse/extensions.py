"""Entry points: the objects that installed packages add to qfuse.

There is one group per kind of object: see :class:`Group`. Names are unique within a group.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from itertools import pairwise
from pathlib import Path
from typing import Generic, Self, TypeVar

from qfuse.ir.errors import USER_CODE_ERRORS, ExtensionError

T = TypeVar("T")

OWN = "qfuse"
"""The origin of what is part of qfuse."""


class Group(StrEnum):
    """A group of entry points. Members are what packages write in their metadata.

    Attributes:
        noun: The word for an object of the group in messages.
    """

    noun: str

    def __new__(cls, value: str, noun: str) -> Self:
        """Make a member with its noun."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.noun = noun
        return member

    DIALECTS = "qfuse.dialects", "dialect"
    RULES = "qfuse.rules", "set of rules"
    KERNELS = "qfuse.kernels", "set of kernels"
    BACKENDS = "qfuse.backends", "backend"


_FIX = "repair the package, or uninstall it to go on without it"


@dataclass(frozen=True, slots=True)
class Extension(Generic[T]):
    """An object that an installed package adds.

    Attributes:
        name: The name of its entry point.
        value: The object.
        origin: Name and version of the distribution.
    """

    name: str
    value: T
    origin: str


def extension_names(group: Group) -> tuple[str, ...]:
    """Return the names of the entry points of a group, sorted; no package is imported."""
    return tuple(sorted({point.name for point in _entry_points(group)}))


def extension_origins(group: Group) -> dict[str, str]:
    """Return the origin of each entry point of a group, by name; no package is imported.

    Raises:
        ExtensionError: Two packages have entry points of one name.
    """
    return {point.name: _origin(point) for point in _points(group)}


def load_extensions(group: Group, kind: type[T]) -> tuple[Extension[T], ...]:
    """Load all objects of a group, in the order of their names.

    Args:
        group: The group of entry points.
        kind: The type that every object must have.

    Raises:
        ExtensionError: A package cannot be imported, gives an object of another type, or has an
            entry point of the same name as another one.
    """
    return tuple(_load(point, kind, group.noun) for point in _points(group))


def load_extension(group: Group, name: str, kind: type[T]) -> Extension[T] | None:
    """Load the object of one name, or return ``None``; no other package is imported.

    Raises:
        ExtensionError: As :func:`load_extensions`.
    """
    found = next((point for point in _points(group) if point.name == name), None)
    return None if found is None else _load(found, kind, group.noun)


@dataclass(frozen=True, slots=True)
class Installed:
    """An entry point of a package, for a list of what is installed.

    Attributes:
        what: The word for its object, as "dialect".
        name: The name of the entry point.
        origin: Name and version of the distribution.
        value: What it refers to, as ``package:name``.
        problem: Why it cannot be loaded; "" if it can.
    """

    what: str
    name: str
    origin: str
    value: str
    problem: str = ""


def list_extensions() -> tuple[Installed, ...]:
    """List what installed packages add to qfuse, by group and name; imports the packages."""
    return tuple(
        Installed(group.noun, point.name, _origin(point), point.value, _problem(point, group.noun))
        for group in Group
        for point in sorted(set(_entry_points(group)), key=lambda p: (p.name, p.value))
    )


def _problem(point: EntryPoint, what: str) -> str:
    try:
        _load(point, object, what)
    except ExtensionError as error:
        return error.what
    return ""


def check_unique(owners: Mapping[str, str], added: Iterable[tuple[str, str]], what: str) -> None:
    """Check that names differ from one another and from known ones.

    Args:
        owners: The origin of each known name.
        added: Further names, each with its origin.
        what: The word for the named objects, as "rule".

    Raises:
        ExtensionError: A name occurs twice; the message names both origins.
    """
    seen = dict(owners)
    for name, origin in added:
        if name in seen:
            raise _clash(what, name, seen[name], origin)
        seen[name] = origin


def _entry_points(group: Group) -> EntryPoints:
    # Reading the metadata of all packages takes milliseconds, and a compilation asks four times.
    return _scanned(group, tuple((path, _changed(path)) for path in sys.path))


@lru_cache(maxsize=len(Group))
def _scanned(group: Group, state: tuple[tuple[str, int], ...]) -> EntryPoints:
    """Return the entry points; ``state`` differs after a package is installed or removed."""
    del state
    return entry_points(group=group)


def _changed(path: str) -> int:
    """Return when the entries of a folder changed, in nanoseconds; 0 if it does not exist."""
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return 0


def _points(group: Group) -> list[EntryPoint]:
    """Return the entry points of a group in the order of their names, each once."""
    # Sorted, since the order of installation must not matter. A folder that is twice on the path
    # gives equal entry points.
    points = sorted(_entry_points(group), key=lambda p: (p.name, p.value))
    distinct = list(dict.fromkeys(points))
    for one, other in pairwise(distinct):
        if one.name == other.name:
            raise _clash(group.noun, one.name, _origin(one), _origin(other))
    return distinct


def _clash(what: str, name: str, one: str, other: str) -> ExtensionError:
    if one == other:
        return ExtensionError(f"{one} has two {what}s {name!r}", fix="rename one of them")
    return ExtensionError(
        f"there are two {what}s {name!r}: one of {one} and one of {other}",
        fix="uninstall one of the packages, or rename one of the two",
    )


def _origin(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value


def _load(point: EntryPoint, kind: type[T], what: str) -> Extension[T]:
    package = f" of {point.dist.name} {point.dist.version}" if point.dist else ""
    text = f"the {what} {point.name!r}{package} (entry point {point.value})"
    try:
        loaded = point.load()
    except USER_CODE_ERRORS as error:
        raise ExtensionError(
            f"{text} cannot be loaded: {type(error).__name__}: {error}", fix=_FIX
        ) from error
    if not isinstance(loaded, kind):
        wanted = f"{kind.__module__}.{kind.__qualname__}"
        raise ExtensionError(f"{text} is {loaded!r}, not a {wanted}", fix=_FIX)
    return Extension(point.name, loaded, _origin(point))
