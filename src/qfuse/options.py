"""What a compilation can be told. The command line's options are derived from these fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from qfuse.ir.errors import OptionsError


class Check(StrEnum):
    """How values are checked while compiling.

    ``SITE``: every rewrite, on the activations that the example inputs produce there, and then the
    whole model. ``PIPELINE``: the whole model once; on failure the culprit is found and undone.
    ``OFF``: nothing.
    """

    SITE = "site"
    PIPELINE = "pipeline"
    OFF = "off"


class Backend(StrEnum):
    """What runs the lowered graph.

    ``AUTO``: ``AOTI`` where a C++ compiler is found, ``EAGER`` with a warning elsewhere.
    """

    AUTO = "auto"
    AOTI = "aoti"
    EAGER = "eager"


@dataclass(frozen=True, slots=True)
class Options:
    """Options of :func:`qfuse.compile`; every field has a default.

    Attributes:
        backend: What runs the lowered graph.
        cache: Reuse and store compiled packages on disk.
        own_kernels: Use qfuse's own C++ kernels where they win.
        without: Names of rewrites of the optimize room that may not happen, such as
            ``merge-linears``: to see what one is worth, or to live without it.
    """

    backend: Backend = field(default=Backend.AUTO, metadata={"help": "what runs the lowered graph"})
    cache: bool = field(
        default=True, metadata={"help": "reuse and store compiled packages on disk"}
    )
    own_kernels: bool = field(
        default=True, metadata={"help": "use qfuse's own C++ kernels where they win"}
    )
    without: tuple[str, ...] = field(
        default=(), metadata={"help": "a rewrite that may not happen, such as merge-linears"}
    )

    @classmethod
    def of(cls, value: Options | Mapping[str, Any] | None) -> Options:
        """Make options from a mapping.

        Raises:
            OptionsError: A name or a value does not exist; the message lists those that do.
        """
        if value is None:
            return cls()
        if isinstance(value, Options):
            return value
        if not isinstance(value, Mapping):
            raise OptionsError(
                f"options must be a qfuse.Options or a mapping, not {type(value).__name__}",
                fix='as in options={"backend": "eager"}',
            )
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(value) - known)
        if unknown:
            raise OptionsError(
                f"unknown option {unknown[0]!r}", fix=f"the options are {', '.join(sorted(known))}"
            )
        given = dict(value)
        if "backend" in given:
            given["backend"] = choice(Backend, given["backend"], "backend")
        for name in ("cache", "own_kernels"):
            if not isinstance(given.get(name, True), bool):
                raise OptionsError(f"option {name!r} must be a bool, not {given[name]!r}")
        if "without" in given:
            given["without"] = _names(given["without"])
        return cls(**given)


def _names(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
        raise OptionsError(
            f"option 'without' must be a list of names, not {value!r}",
            fix='as in options={"without": ["merge-linears"]}',
        )
    return tuple(value)


def choice(kind: type[StrEnum], value: object, name: str) -> Any:
    """Return the member of ``kind`` that ``value`` names.

    Raises:
        OptionsError: There is none.
    """
    try:
        return kind(str(value))
    except ValueError:
        names = ", ".join(repr(member.value) for member in kind)
        raise OptionsError(f"{name}={value!r} is not one of {names}") from None
