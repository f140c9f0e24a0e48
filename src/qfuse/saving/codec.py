"""Values as JSON: constants of a signature, and the dataclasses that are saved.

JSON has no tuples, data types or infinities. What it has is written as it is; everything else as an
object with one key that begins with ``$``. Decoding makes values of the kinds below only: it never
imports or calls what a file names.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch

from qfuse.ir.errors import ModelFileError, OptionsError
from qfuse.ir.words import a_kind

_TORCH: dict[str, type[Any]] = {
    "$dtype": torch.dtype,
    "$layout": torch.layout,
    "$memory_format": torch.memory_format,
}
BAD_DATA = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""The errors of malformed data."""


class UnknownValueError(ValueError):
    """A value that has no form in JSON."""


@contextmanager
def decoding(where: str) -> Iterator[None]:
    """Context manager that reports what is wrong in the data of a file.

    Raises:
        ModelFileError: In place of the errors of malformed data.
        OptionsError: What is wrong is an option of this process, and not the file.
    """
    try:
        yield
    except OptionsError:
        raise
    except BAD_DATA as error:
        raise ModelFileError(
            f"its contents are malformed ({type(error).__name__}: {error})",
            where=where,
            fix="save the model again; if that does not help, report this as a bug of qfuse",
        ) from error


def to_data(value: Any) -> Any:
    """Return ``value`` as what JSON can hold.

    >>> to_data((1, torch.int8))
    {'$tuple': [1, {'$dtype': 'int8'}]}

    Raises:
        UnknownValueError: A value is of another kind.
    """
    if value is None or type(value) in {bool, int, str}:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, (tuple, list, dict, slice)):
        return _container(value)
    kind = type(value)
    if _is_data(kind) and is_dataclass(kind):
        given = [f.name for f in fields(kind) if f.init]
        return {f"${class_name(kind)}": {name: to_data(getattr(value, name)) for name in given}}
    if _is_data(kind) and issubclass(kind, Enum):
        return {f"${class_name(kind)}": value.value}
    return _leaf(value)


def from_data(data: Any) -> Any:
    """Return the value of :func:`to_data`.

    Raises:
        ValueError: The data are malformed; other errors of wrong types as well.
    """
    if isinstance(data, list):
        return [from_data(item) for item in data]
    if not isinstance(data, dict):
        return data
    (tag,) = data if len(data) == 1 else ("",)
    if not tag.startswith("$"):
        return {key: from_data(item) for key, item in data.items()}
    return _tagged(tag, data[tag])


def class_name(kind: type) -> str:
    """Return a name that :func:`find_class` finds the class by."""
    return f"{kind.__module__}:{kind.__qualname__}"


def find_class(name: str) -> type | None:
    """Return a class of a module that is imported already; ``None`` if it is not there.

    Nothing is imported: what is imported is not for a file to say.
    """
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None


def _is_data(kind: type) -> bool:
    """Whether a class is one of the dataclasses and enums of qfuse."""
    own = kind.__module__.partition(".")[0] == "qfuse"
    return own and (is_dataclass(kind) or issubclass(kind, Enum))


def _container(value: Any) -> Any:
    if type(value) is list:
        return [to_data(item) for item in value]
    if type(value) in {tuple, torch.Size}:
        return {"$tuple": [to_data(item) for item in value]}
    if isinstance(value, slice):
        return {"$slice": [to_data(part) for part in (value.start, value.stop, value.step)]}
    if type(value) is dict:
        plain = all(type(key) is str and not key.startswith("$") for key in value)
        if plain:
            return {key: to_data(item) for key, item in value.items()}
        return {"$dict": [[to_data(key), to_data(item)] for key, item in value.items()]}
    # FX keeps the arguments of a node in lists and dictionaries of its own.
    kind = next((base for base in (list, tuple, dict) if isinstance(value, base)), None)
    if kind is None or type(value).__module__ != "torch.fx.immutable_collections":
        raise UnknownValueError(a_kind(value))
    return _container(kind(value))


def _leaf(value: Any) -> Any:
    for tag, kind in _TORCH.items():
        if isinstance(value, kind):
            return {tag: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if type(value) is complex:
        return {"$complex": [to_data(value.real), to_data(value.imag)]}
    if value is ...:
        return {"$ellipsis": None}
    if isinstance(value, type):
        return {"$class": class_name(value)}
    raise UnknownValueError(a_kind(value))


def _class(name: str) -> type:
    found = find_class(name)
    if found is None:
        raise UnknownValueError(f"the class {name}, which is not imported")
    return found


def _torch_constant(tag: str, name: str) -> Any:
    value = getattr(torch, name)
    if not isinstance(value, _TORCH[tag]):
        raise TypeError(f"torch.{name} is not a {tag[1:]}")
    return value


_LEAVES: dict[str, Callable[[Any], Any]] = {
    "$tuple": lambda data: tuple(from_data(item) for item in data),
    "$dict": lambda data: {from_data(key): from_data(item) for key, item in data},
    "$slice": lambda data: slice(*(from_data(part) for part in data)),
    "$float": float,
    "$complex": lambda data: complex(*(from_data(part) for part in data)),
    "$ellipsis": lambda data: ...,  # noqa: ARG005
    "$device": torch.device,
    "$class": _class,
}


def _tagged(tag: str, data: Any) -> Any:
    if tag in _LEAVES:
        return _LEAVES[tag](data)
    if tag in _TORCH:
        return _torch_constant(tag, data)
    kind = find_class(tag[1:])
    if kind is None or not _is_data(kind):
        raise TypeError(f"{tag[1:]} is not a class of data")
    if is_dataclass(kind):
        return kind(**{name: from_data(item) for name, item in data.items()})
    return kind(data)
