"""The machine that the tests run on, or the lesser one that ``QFUSE_TEST_ISA`` asks for.

``make test ISA=avx2`` runs the suite as if the CPU had nothing better than AVX2: qfuse's own
kernels and ATen stay below it, and ``Target.detect`` sees no feature above it. oneDNN is left
alone: ``ONEDNN_MAX_CPU_ISA`` alone makes torch's integer product saturate, since torch still sees
VNNI and sends it to oneDNN, which it does not do on a CPU without VNNI.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from qfuse.kernels import KernelLibrary, library, load
from qfuse.targets import Target
from qfuse.targets.cpu import _TORCH_NAMES

__all__ = [
    "ISA_VARIABLE",
    "PATHS",
    "limit",
    "limit_kernels",
    "needs",
    "needs_own_kernels",
    "onednn_has_amx",
    "set_variables",
    "this_machine",
]

ISA_VARIABLE = "QFUSE_TEST_ISA"
# Paths of qfuse's own kernels, the best one last.
PATHS = ("portable", "avx2", "avx_vnni", "avx512", "amx_emulated", "avx512_vnni", "amx")
# What keeps qfuse's own kernels and ATen below an instruction set.
_VARIABLES = {
    "portable": ("portable", "default"),
    "avx2": ("avx2", "avx2"),
    "avx_vnni": ("avx_vnni", "avx2"),
    "avx512": ("avx512", "avx512"),
    "avx512_vnni": ("avx512_vnni", "avx512"),
    "amx": ("amx", "avx512"),
}
_NAMES = ("QFUSE_ISA", "ATEN_CPU_CAPABILITY")


def limit(patch: pytest.MonkeyPatch) -> None:
    """Do in this process what ``QFUSE_TEST_ISA`` asks for.

    Raises:
        UsageError: It names an instruction set that is unknown, or that this machine lacks.
    """
    isa = os.environ.get(ISA_VARIABLE)
    if not isa:
        return
    if isa not in _VARIABLES:
        raise pytest.UsageError(f"{ISA_VARIABLE}={isa} is not one of {', '.join(_VARIABLES)}")
    wanted = Target.for_testing(isa=isa)
    lacking = wanted.features - Target.detect(extensions=False).features - {"avx512_bf16"}
    if lacking:
        raise pytest.UsageError(f"{ISA_VARIABLE}={isa}: no {', '.join(sorted(lacking))} here")
    found = torch.backends.cpu.get_cpu_capability()
    if found != wanted.aten_capability:
        raise pytest.UsageError(f"{ISA_VARIABLE}={isa}: ATen already dispatches on {found}")
    patch.setattr(torch.cpu, "get_capabilities", functools.partial(_capabilities, isa, _real))
    patch.setattr(library, "_loaded", functools.partial(limit_kernels, isa, library._loaded))


_real: Callable[[], Mapping[str, Any]] = torch.cpu.get_capabilities


def set_variables(environ: Any = os.environ) -> None:
    """Set what subprocesses inherit, and libraries read once, before anything is computed."""
    isa = environ.get(ISA_VARIABLE)
    for name, value in zip(_NAMES, _VARIABLES.get(isa, ()), strict=False):
        environ[name] = value


def _capabilities(isa: str, real: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """What cpuinfo found, without the instruction sets that the target for tests lacks."""
    kept = {_TORCH_NAMES.get(name, name) for name in Target.for_testing(isa=isa).features}
    if isa != "portable":
        kept |= {"f16c", "fma3"}
    found = real()
    return {k: v and k in kept if isinstance(v, bool) else v for k, v in found.items()}


def limit_kernels(isa: str, load: Callable[..., KernelLibrary], *args: Any, **kw: Any) -> Any:
    """The library that ``load`` gives, without the paths above ``isa``."""
    found = load(*args, **kw)
    allowed = PATHS[: PATHS.index(isa) + 1]
    if isa == "avx512":
        # With AVX512-VNNI this path runs too, in another encoding.
        allowed = tuple(path for path in allowed if path != "avx_vnni")
    return replace(found, instruction_sets=tuple(p for p in found.instruction_sets if p in allowed))


@functools.cache
def this_machine() -> Target:
    """The facts that the ``isa`` marker asks for; unknown names of features are an error there."""
    return Target.detect(extensions=False)


def onednn_has_amx() -> bool:
    """Whether oneDNN may multiply bfloat16 with AMX: ``QFUSE_TEST_ISA`` does not hold it."""
    return bool(_real().get("amx_bf16"))


def needs_own_kernels() -> None:
    """Skip a test where qfuse's own kernels cannot be built; that a build fails is no reason."""
    found = load()
    if not found.available and "no C++ compiler" in found.reason:
        pytest.skip("needs own kernels")
    assert found.available, found.reason


def needs(*features: str) -> None:
    """Skip a test where the CPU lacks one of these instruction sets.

    ``vnni`` stands for any that adds products of bytes without saturating.
    """
    missing = [name for name in features if not _has(name)]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")


def _has(name: str) -> bool:
    return this_machine().has_vnni if name == "vnni" else this_machine().has(name)
