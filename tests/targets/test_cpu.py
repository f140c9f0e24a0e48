"""Facts of the operating system, read from folders that tests make up."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from qfuse.targets.cpu import FEATURES, read_cpu

CPUINFO = """\
processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Test CPU @ 2.00GHz
flags\t\t: fpu avx2 avx512f amx_tile {more}

processor\t: 1
vendor_id\t: SomeoneElse
"""


def machine(root: Path, files: dict[str, str]) -> Path:
    """A root folder with some files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def cache(index: int, level: str, kind: str, size: str) -> dict[str, str]:
    """The files of one cache."""
    folder = f"sys/devices/system/cpu/cpu0/cache/index{index}"
    return {f"{folder}/level": level, f"{folder}/type": kind, f"{folder}/size": size}


def test_names_come_from_the_first_processor(tmp_path: Path) -> None:
    cpu = read_cpu({"cpu_name": "other"}, machine(tmp_path, {"proc/cpuinfo": CPUINFO}))

    assert (cpu.vendor, cpu.model) == ("GenuineIntel", "Test CPU @ 2.00GHz")


def test_without_proc_torch_is_asked(tmp_path: Path) -> None:
    cpu = read_cpu(
        {"cpu_name": "Neoverse", "architecture": "aarch64", "l2_cache_size": 7, "neon": True},
        tmp_path,
    )

    assert (cpu.vendor, cpu.model, cpu.architecture) == ("", "Neoverse", "aarch64")
    assert (cpu.l2_bytes, cpu.l3_bytes, cpu.features) == (7, 0, frozenset({"neon"}))


@pytest.mark.parametrize(
    ("capabilities", "features"),
    [
        (
            {"avx512_f": True, "avx512_bw": True, "avx512_vnni": True},
            "avx512bw avx512f avx512_vnni",
        ),
        ({"avx2": True, "avx512_f": False}, "avx2"),
        ({"avx2": 1, "sve_max_length": 256, "architecture": "x"}, ""),
        ({"sse4_1": True}, ""),
    ],
)
def test_features_have_one_spelling(
    tmp_path: Path, capabilities: dict[str, Any], features: str
) -> None:
    assert read_cpu(capabilities, tmp_path).features == frozenset(features.split())
    assert set(features.split()) <= set(FEATURES)


def test_tiles_need_the_kernel(tmp_path: Path) -> None:
    capabilities = {"amx_tile": True, "amx_int8": True, "avx_vnni": True}
    old = machine(tmp_path / "old", {"proc/cpuinfo": CPUINFO.format(more="")})
    new = machine(tmp_path / "new", {"proc/cpuinfo": CPUINFO.format(more="amx_int8")})

    assert read_cpu(capabilities, old).features == {"amx_tile", "avx_vnni"}
    assert read_cpu(capabilities, new).features == {"amx_tile", "amx_int8", "avx_vnni"}


def test_caches(tmp_path: Path) -> None:
    files = {
        **cache(0, "1", "Data", "32K"),
        **cache(1, "1", "Instruction", "64K"),
        **cache(2, "2", "Unified", "2048K\n"),
        **cache(3, "3", "Unified", "36M"),
        **cache(4, "junk", "Unified", "many"),
    }

    cpu = read_cpu({"l2_cache_size": 1}, machine(tmp_path, files))

    assert (cpu.l2_bytes, cpu.l3_bytes) == (2 << 20, 36 << 20)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"sys/fs/cgroup/cpu.max": "100000 100000\n"}, 1),
        ({"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"sys/fs/cgroup/cpu.max": "100000000 100000\n"}, None),
        ({"sys/fs/cgroup/cpu.max": "100000 0"}, None),
        ({"sys/fs/cgroup/cpu.max": "nonsense"}, None),
        (
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            1,
        ),
        (
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
    ],
)
def test_a_quota_limits_the_cores(tmp_path: Path, files: dict[str, str], cores: int | None) -> None:
    affinity = len(os.sched_getaffinity(0))

    assert read_cpu({}, machine(tmp_path, files)).usable_cores == (cores or affinity)


def test_physical_cores_are_torchs(tmp_path: Path) -> None:
    assert read_cpu({"num_physical_cores": 48}, tmp_path).cores == 48
    assert read_cpu({}, tmp_path).cores == os.cpu_count()
