"""The libraries that the kernels are built into: a core, and one for each instruction-set path.

The core has the ops and chooses the path; it loads the library of a path when that is needed, see
``csrc/isa/select.cpp``. So a machine compiles what it runs, and not what others would.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from typing import Any

from qfuse.kernels.compilation.compiler import sanitizer_flags

CORE = ""
"""The name of the library of all files that no path has for itself."""

_FILES = {
    "portable": ("isa/portable.cpp",),
    "avx2": ("isa/avx2.cpp",),
    "avx_vnni": ("isa/avx_vnni.cpp",),
    "avx_vnni_evex": ("isa/avx_vnni_evex.cpp",),
    "avx512": ("isa/avx512.cpp", "quantized/real_avx512.cpp"),
    "avx512_vnni": ("isa/avx512_vnni.cpp",),
    "amx": ("isa/amx.cpp",),
    "amx_emulated": ("isa/amx_emulated.cpp",),
}
PATHS = tuple(_FILES) if platform.machine() in {"x86_64", "AMD64"} else ("portable",)
"""The names of the other libraries of this architecture."""

# Of one core of an AMD EPYC (Zen 4), with g++ 12.
_CPU_SECONDS = {
    CORE: 92, "portable": 18, "avx2": 27, "avx_vnni": 3, "avx_vnni_evex": 3, "avx512": 42,
    "avx512_vnni": 11, "amx": 2, "amx_emulated": 2,
}  # fmt: skip

# The libraries that each path needs; avx_vnni is in one of two encodings.
_NEEDED = {
    "portable": ("portable",),
    "avx2": ("avx2",),
    "avx_vnni": ("avx2", "avx_vnni"),
    "avx512": ("avx512",),
    "avx512_vnni": ("avx512", "avx512_vnni"),
    "amx": ("avx512", "avx512_vnni", "amx"),
    "amx_emulated": ("avx512", "avx512_vnni", "amx_emulated"),
}
_AVX512 = ("avx512_f", "avx512_bw", "avx512_dq", "avx512_vl")
_AMX = ("amx_tile", "amx_int8", "amx_bf16")


def part_of(file: str) -> str:
    """Return the name of the library that a source belongs to.

    Args:
        file: The source, relative to the root of the sources.
    """
    return next((name for name, files in _FILES.items() if file in files), CORE)


def expected_parts(capabilities: Mapping[str, Any], isa: str = "") -> tuple[str, ...]:
    """Return the libraries that a processor needs first, which are compiled with the core.

    The core decides what it loads. If that differs, it is compiled after the core.

    Args:
        capabilities: What ``torch.cpu.get_capabilities`` says.
        isa: The path that is forced; "" if none is.
    """
    parts = _NEEDED.get(isa or _best(capabilities), ())
    if not capabilities.get("avx_vnni"):
        parts = tuple("avx_vnni_evex" if part == "avx_vnni" else part for part in parts)
    return parts


def described(parts: Iterable[str]) -> str:
    """Return what libraries are, for a message."""
    return ", ".join(part or "the ops" for part in parts)


def duration(parts: Iterable[str]) -> str:
    """Return about how long it takes to compile all files of libraries on an idle machine."""
    cores = len(os.sched_getaffinity(0))
    if sanitizer_flags():
        return "many minutes"
    tens = round(sum(_CPU_SECONDS[part] for part in parts) / cores / 10)
    return f"about {10 * max(tens, 1)} s on {cores} core{'s' * (cores > 1)}"


def _best(capabilities: Mapping[str, Any]) -> str:
    if _has(capabilities, _AVX512):
        if not capabilities.get("avx512_vnni"):
            return "avx512"
        return "amx" if _has(capabilities, _AMX) else "avx512_vnni"
    if capabilities.get("avx2") and capabilities.get("fma3"):
        return "avx_vnni" if capabilities.get("avx_vnni") else "avx2"
    return "portable"


def _has(capabilities: Mapping[str, Any], names: Iterable[str]) -> bool:
    return all(capabilities.get(name) for name in names)
