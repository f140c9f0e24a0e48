"""CPU facts from the operating system: names, caches, cores, instruction sets."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Instruction sets by their Linux kernel names (those of ARM by torch's), with torch's name if it
# differs.
_TORCH_NAMES = {
    "avx512f": "avx512_f",
    "avx512bw": "avx512_bw",
    "avx512dq": "avx512_dq",
    "avx512vl": "avx512_vl",
}
FEATURES: tuple[str, ...] = (
    "amx_bf16",
    "amx_fp16",
    "amx_int8",
    "amx_tile",
    "avx",
    "avx10_1",
    "avx10_2",
    "avx2",
    "avx512_bf16",
    "avx512_fp16",
    "avx512_vnni",
    "avx512bw",
    "avx512dq",
    "avx512f",
    "avx512vl",
    "avx_vnni",
    "avx_vnni_int8",
    "bf16",
    "dot",
    "f16c",
    "fma3",
    "i8mm",
    "neon",
    "sve",
    "sve2",
)
# Tile registers need support of the operating system besides that of the CPU.
_NEEDS_KERNEL = ("amx_bf16", "amx_fp16", "amx_int8", "amx_tile")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True)
class Cpu:
    """A CPU, as seen from this process.

    Attributes:
        architecture: ``x86_64``, ``aarch64``, ...
        vendor: As reported by the CPU, such as ``GenuineIntel``; "" if unknown.
        model: Marketing name; "" if unknown.
        features: Usable instruction sets, out of :data:`FEATURES`.
        cores: Physical cores of the machine.
        usable_cores: Cores that this process may use: its affinity mask and container quota.
        l2_bytes: L2 cache of one core; 0 if unknown.
        l3_bytes: One last-level cache; 0 if unknown or absent.
    """

    architecture: str
    vendor: str
    model: str
    features: frozenset[str]
    cores: int
    usable_cores: int
    l2_bytes: int
    l3_bytes: int


def read_cpu(capabilities: Mapping[str, Any], root: Path = Path("/")) -> Cpu:
    """Combine the facts from torch's cpuinfo and the operating system.

    Args:
        capabilities: ``torch.cpu.get_capabilities()``.
        root: The parent of ``proc`` and ``sys``; a different folder in tests.
    """
    info = _cpuinfo(root)
    caches = _caches(root)
    logical = os.cpu_count() or 1
    return Cpu(
        architecture=str(capabilities.get("architecture") or platform.machine()),
        vendor=info.get("vendor_id", ""),
        model=info.get("model name") or str(capabilities.get("cpu_name", "")),
        features=_features(capabilities, info),
        cores=int(capabilities.get("num_physical_cores") or logical),
        usable_cores=_usable_cores(root, logical),
        l2_bytes=caches.get(2) or int(capabilities.get("l2_cache_size") or 0),
        l3_bytes=caches.get(3, 0),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        # Not Linux, or a sandbox without this file: the fact is unknown, not an error.
        return ""


def _cpuinfo(root: Path) -> dict[str, str]:
    """Return the first processor's block of ``/proc/cpuinfo``."""
    block = _read(root / "proc/cpuinfo").split("\n\n", 1)[0]
    pairs = (line.split(":", 1) for line in block.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _features(capabilities: Mapping[str, Any], info: Mapping[str, str]) -> frozenset[str]:
    # Some capabilities are sizes and names, and not flags.
    found = {name for name in FEATURES if capabilities.get(_TORCH_NAMES.get(name, name)) is True}
    flags = info.get("flags", "").split()
    # Without the file of Linux, torch's word has to do.
    if flags:
        found -= {name for name in _NEEDS_KERNEL if name not in flags}
    return frozenset(found)


def _caches(root: Path) -> dict[int, int]:
    """Return the bytes of the data or unified cache of each level, for the first core."""
    sizes: dict[int, int] = {}
    for index in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level = _read(index / "level").strip()
        size = re.fullmatch(r"(\d+)([KMG]?)", _read(index / "size").strip())
        # Level 1 has two caches, and kernels read data.
        if size and level.isdigit() and _read(index / "type").strip() != "Instruction":
            sizes[int(level)] = int(size[1]) * _UNITS[size[2]]
    return sizes


def _usable_cores(root: Path, logical: int) -> int:
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    quota = _quota(root)
    # Half a core still needs one thread; a quota of 2.5 cores starves a third thread.
    return affinity if quota is None else max(1, min(affinity, int(quota)))


def _quota(root: Path) -> float | None:
    """Return the container's CPU quota in cores, from either version of cgroups."""
    legacy = root / "sys/fs/cgroup/cpu"
    texts = (
        _read(root / "sys/fs/cgroup/cpu.max"),
        f"{_read(legacy / 'cpu.cfs_quota_us')} {_read(legacy / 'cpu.cfs_period_us')}",
    )
    for text in texts:
        # "max" or -1 as the first value means unlimited.
        limit = re.fullmatch(r"(\d+)\s+([1-9]\d*)", text.strip())
        if limit:
            return int(limit[1]) / int(limit[2])
    return None
