"""The options of a compilation. The command line derives its options from these fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from qfuse.extensions import Group, extension_names
from qfuse.ir.errors import OptionsError
from qfuse.targets import checked_threads


class Check(StrEnum):
    """How values are checked while compiling.

    ``SITE`` checks every rewrite on the activations of the example inputs, then the whole model.
    ``PIPELINE`` checks the whole model once; on failure, bisection finds the rewrite to undo.
    ``OFF`` checks nothing.
    """

    SITE = "site"
    PIPELINE = "pipeline"
    OFF = "off"


class BuiltinBackend(StrEnum):
    """What runs the lowered graph, without a backend of another package.

    ``AUTO`` means ``AOTI`` if a C++ compiler is found, and otherwise ``EAGER`` with a warning.
    """

    AUTO = "auto"
    AOTI = "aoti"
    EAGER = "eager"


class Prefer(StrEnum):
    """What runs a quantized product that is faster in float.

    ``SPEED``: the float product, with its weight dequantized at compile time, as long as
    ``float_memory`` lasts. ``MEMORY``: the quantized kernel, wherever there is one.
    """

    SPEED = "speed"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Options:
    """Options of :func:`qfuse.compile`; every field has a default.

    Attributes:
        backend: What runs the lowered graph: ``auto``, ``aoti`` or ``eager``; or who claims its
            ops: the name of an installed backend, a :class:`qfuse.backends.Backend`, or a tuple of
            these, first choice first.
        cache: Reuse and store compiled packages on disk.
        own_kernels: Use qfuse's own C++ kernels where they are predicted to be faster.
        without: Names of rewrites of the optimize stage to disable, such as ``merge-linears``: to
            measure what one brings, or to work around it.
        threads: How many threads a call of the compiled model uses, and what it is planned for; by
            default ``torch.get_num_threads()``. Nothing outside of the model changes.
        prefer: ``speed`` runs a quantized product in float where that is faster; ``memory`` runs
            it on a quantized kernel wherever there is one.
        float_memory: With ``prefer="speed"``, by how many MB weights that are dequantized at
            compile time may enlarge the constants of the model in all.
        measure_seconds: With ``measure=True``, seconds after which the rest is predicted.
        free_source: Give up the weights of the source model when the plan is made and its values
            are checked, before it is compiled. The module that was passed keeps no parameter and
            no buffer but those that the compiled model writes, and cannot be called any more, also
            if the compilation fails afterwards. Refused for an exported program, and inside
            ``torch.compile``. The command line has no such option: it times the source model.
        repro: Folder for directories that reproduce rewrites which changed values and were rolled
            back (see ``docs/debugging.md``); they hold the model's weights and example inputs. By
            default that of the environment variable ``QFUSE_REPRO``, and none without it.

    Raises:
        OptionsError: A value is not one of the valid ones; the message lists them.
    """

    backend: Any = field(
        default=BuiltinBackend.AUTO,
        metadata={"help": "what runs the lowered graph, or an installed backend", "open": True},
    )
    cache: bool = field(
        default=True, metadata={"help": "reuse and store compiled packages on disk"}
    )
    own_kernels: bool = field(
        default=True, metadata={"help": "use qfuse's own C++ kernels where they are faster"}
    )
    without: tuple[str, ...] = field(
        default=(), metadata={"help": "a rewrite to disable, such as merge-linears"}
    )
    threads: int | None = field(
        default=None,
        metadata={"help": "threads of a call of the compiled model, 1 or more; by default torch's"},
    )
    prefer: Prefer = field(
        default=Prefer.SPEED,
        metadata={"help": "speed: float where it is faster; memory: quantized kernels"},
    )
    float_memory: int = field(
        default=512,
        metadata={"help": "MB by which float weights may enlarge the constants"},
    )
    measure_seconds: float = field(
        default=20.0, metadata={"help": "seconds that measuring may take"}
    )
    free_source: bool = field(default=False, metadata={"api_only": True})
    repro: Path | None = field(
        default=None,
        metadata={"help": "keep what reproduces wrong rewrites in this folder", "folder": True},
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "backend", _backend(self.backend))
        for name in ("cache", "own_kernels", "free_source"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise OptionsError(f"option {name!r} must be a bool, not {value!r}")
        object.__setattr__(self, "prefer", choice(Prefer, self.prefer, "prefer"))
        bound: object = self.float_memory
        if isinstance(bound, bool) or not isinstance(bound, int) or bound < 0:
            raise OptionsError(
                f"option 'float_memory' must be a number of MB, not {bound!r}",
                fix="0 takes float only where the constants do not grow",
            )
        budget: object = self.measure_seconds
        if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not budget > 0:
            raise OptionsError(f"option 'measure_seconds' must be positive, not {budget!r}")
        object.__setattr__(self, "without", _names(self.without))
        object.__setattr__(self, "threads", checked_threads(self.threads))
        object.__setattr__(self, "repro", _folder(self.repro))

    @classmethod
    def of(cls, value: Options | Mapping[str, Any] | None) -> Options:
        """Make options from a mapping.

        Raises:
            OptionsError: A name or a value is unknown; the message lists the valid ones.
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
        return cls(**value)


def _backend(value: object) -> Any:
    """Return a built-in backend, or what names or is one of another package."""
    if isinstance(value, str):
        if value in set(BuiltinBackend):
            return BuiltinBackend(value)
        known = (*BuiltinBackend, *extension_names(Group.BACKENDS))
        if value in known:
            return value
        names = ", ".join(repr(str(name)) for name in known)
        raise OptionsError(f"backend={value!r} is not one of {names}")
    if isinstance(value, (tuple, list)) and value:
        parts = tuple(map(_backend, value))
        if not any(isinstance(part, (BuiltinBackend, tuple)) for part in parts):
            return parts
    elif hasattr(value, "supported_ops") and hasattr(value, "is_legal"):
        return value
    raise OptionsError(
        f"backend={value!r} is not a backend",
        fix="give a name, a qfuse.backends.Backend, or a tuple of backends of other packages",
    )


def _names(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
        raise OptionsError(
            f"option 'without' must be a list of names, not {value!r}",
            fix='as in options={"without": ["merge-linears"]}',
        )
    return tuple(value)


def _folder(value: object) -> Path | None:
    if value is None or isinstance(value, (str, Path)):
        return Path(value) if value else None
    raise OptionsError(
        f"option 'repro' must be a path, not {value!r}", fix='as in options={"repro": "wrong"}'
    )


def choice(kind: type[StrEnum], value: object, name: str) -> Any:
    """Return the member of ``kind`` that ``value`` names.

    Raises:
        OptionsError: No member has that value.
    """
    try:
        return kind(str(value))
    except ValueError:
        names = ", ".join(repr(member.value) for member in kind)
        raise OptionsError(f"{name}={value!r} is not one of {names}") from None
