"""The class of a machine: the best instructions for int8 products that it has, or is held to.

Tables of one class are comparable, those of different classes are not. A machine can be held to
fewer instruction sets than it has: by variables that qfuse and its rivals read when they start.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

import click

from qfuse.ir.errors import OptionsError
from qfuse.targets import Target

_FEATURES = {
    "amx": "amx_int8",
    "avx512_vnni": "avx512_vnni",
    "avx_vnni": "avx_vnni",
    "avx512": "avx512f",
    "avx2": "avx2",
}
_TITLES = {
    "amx": "AMX",
    "avx512_vnni": "AVX512-VNNI",
    "avx_vnni": "AVX-VNNI",
    "avx512": "AVX512 without VNNI",
    "avx2": "AVX2",
}
_WITH_VNNI = frozenset(("amx", "avx512_vnni", "avx_vnni"))
_FORCED = "-forced-on-"
_PARTLY = "-partly-limited"

LIMITS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "avx512_vnni": {
            "QFUSE_ISA": "avx512_vnni",
            "ATEN_CPU_CAPABILITY": "avx512",
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
            "OV_CPU_MAX_ISA": "AVX512_CORE_BF16",
            "MKL_ENABLE_INSTRUCTIONS": "AVX512",
            "TORCHINDUCTOR_CPP_MARCH": "cooperlake",
        },
        "avx_vnni": {
            "QFUSE_ISA": "avx_vnni",
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2_VNNI",
            "OV_CPU_MAX_ISA": "AVX2_VNNI",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            "TORCHINDUCTOR_CPP_MARCH": "x86-64-v3",
        },
        "avx512": {
            "QFUSE_ISA": "avx512",
            "ATEN_CPU_CAPABILITY": "avx512",
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
            "OV_CPU_MAX_ISA": "AVX512_CORE",
            "MKL_ENABLE_INSTRUCTIONS": "AVX512",
            "TORCHINDUCTOR_CPP_MARCH": "x86-64-v4",
        },
        "avx2": {
            "QFUSE_ISA": "avx2",
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "OV_CPU_MAX_ISA": "AVX2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            "TORCHINDUCTOR_CPP_MARCH": "x86-64-v3",
        },
    }
)
"""By instruction set, what holds qfuse, ATen and Inductor, oneDNN, OpenVINO, MKL and the compiler
of Inductor to it."""

VARIABLES: tuple[str, ...] = tuple(dict.fromkeys(name for one in LIMITS.values() for name in one))
"""All of these variables."""


@dataclass(frozen=True, slots=True)
class MachineClass:
    """What the tables of a page are kept by.

    Attributes:
        best: The best instruction set of the processor for int8 products, or its architecture.
        variables: Those of :data:`VARIABLES` that are set.
    """

    best: str
    variables: tuple[tuple[str, str], ...] = ()

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Return the class of this machine and process."""
        given = tuple((name, environ[name]) for name in VARIABLES if environ.get(name))
        return cls(_best(Target.detect(extensions=False)), given)

    @property
    def limit(self) -> str:
        """The narrower instruction set that everything is held to; "" if it is not."""
        return next(
            (isa for isa, limits in LIMITS.items() if limits == dict(self.variables)),
            "",
        )

    @property
    def is_whole(self) -> bool:
        """Whether nothing is held to less than the processor has."""
        return not self.variables or self.limit == self.best

    @property
    def has_vnni(self) -> bool:
        """Whether there are int8 dot products that do not saturate."""
        return (self.limit or self.best) in _WITH_VNNI

    @property
    def name(self) -> str:
        """``avx512_vnni``, or ``avx2-forced-on-avx512_vnni``."""
        if self.is_whole:
            return self.best
        return f"{self.limit}{_FORCED}{self.best}" if self.limit else f"{self.best}{_PARTLY}"

    @property
    def title(self) -> str:
        """``AVX512-VNNI``, or ``AVX2 (forced on a machine with AVX512-VNNI)``."""
        best = _TITLES.get(self.best, self.best)
        if self.is_whole:
            return best
        if not self.limit:
            return f"{best}, partly limited"
        return f"{_TITLES[self.limit]} (forced on a machine with {best})"

    @property
    def note(self) -> str:
        """What holds it to less; "" if nothing does."""
        if self.is_whole:
            return ""
        return f"Limited by {', '.join(f'`{name}={value}`' for name, value in self.variables)}."


def order_of(name: str) -> tuple[Any, ...]:
    """Return a key that sorts names of classes: the best machine first, forced ones after it."""
    limit, forced, best = name.removesuffix(_PARTLY).rpartition(_FORCED)
    ranks = list(_FEATURES)

    def rank(isa: str) -> int:
        return ranks.index(isa) if isa in ranks else len(ranks)

    return rank(best), best, bool(forced) or name.endswith(_PARTLY), rank(limit), name


def restart_with_limits(
    isa: str,
    environ: Mapping[str, str] = os.environ,
    execute: Callable[[str, list[str], dict[str, str]], Any] = os.execve,
) -> None:
    """Start this program anew, held to an instruction set, unless it is already.

    The libraries read their variables once, when they are loaded, so a running process is late.

    Args:
        isa: A name out of :data:`LIMITS`; "" for no limit.
        environ: The variables of this process.
        execute: Replaces the process.

    Raises:
        OptionsError: There is no such limit, or the machine lacks the instruction set.
    """
    if not isa:
        return
    if isa not in LIMITS:
        raise OptionsError(
            f"nothing is known that holds all engines to {isa!r}",
            fix=f"there are {', '.join(LIMITS)}",
        )
    if not Target.detect(extensions=False).has(_FEATURES[isa]):
        raise OptionsError(f"this machine has no {_TITLES[isa]}", fix="measure without --isa")
    if all(environ.get(name) == value for name, value in LIMITS[isa].items()):
        return
    sys.stdout.flush()
    arguments = [sys.executable, *sys.orig_argv[1:]]
    execute(sys.executable, arguments, {**environ, **LIMITS[isa]})


def narrower(target: Target) -> list[str]:
    """Return the limits below what a machine has, the best first.

    A processor may have AVX-VNNI or AVX512 without the other.
    """
    best = _best(target)
    lower = LIMITS if best in _FEATURES else ()
    return [isa for isa in lower if isa != best and target.has(_FEATURES[isa])]


def _best(target: Target) -> str:
    if target.architecture != "x86_64":
        return target.architecture
    return next((isa for isa, name in _FEATURES.items() if target.has(name)), "portable")


def main() -> None:
    """Print the instruction sets that this machine can be held to, for ``make bench``."""
    click.echo(" ".join(narrower(Target.detect(extensions=False))))


if __name__ == "__main__":
    main()
