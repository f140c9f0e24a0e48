"""A wheel with kernels inside needs no compiler where it is installed."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from qfuse.kernels import KernelLibrary, build_every_path, copy_library

ROOT = Path(__file__).parents[2]
USING = """
import torch
from qfuse import kernels
library = kernels.load()
packed, sums = kernels.pack_weight(torch.ones(3, 4, dtype=torch.int8))
x = torch.ones(2, 4, dtype=torch.int8)
y = kernels.linear_w8a8(x, torch.ones(1), None, packed, sums, torch.ones(3))
with kernels.instruction_set("portable"):
    z = kernels.linear_w8a8(x, torch.ones(1), None, packed, sums, torch.ones(3))
print(library.path, library.compiled, y.sum().item(), torch.equal(y, z))
"""

needs_packaging = pytest.mark.skipif(
    # Looking for the module pip itself switches off what setuptools does for distutils.
    not {"hatchling", "pip"} <= {d.name for d in importlib.metadata.distributions()},
    reason="needs pip and hatchling",
)
pytestmark = [pytest.mark.slow, needs_packaging]


def python(*args: str, path: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Run this interpreter with nothing of this checkout on its path."""
    return subprocess.run(
        [sys.executable, *args],
        env={**os.environ, "PYTHONPATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **env},
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip


def wheel(to: Path, **env: str) -> subprocess.CompletedProcess[str]:
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(to))
    return python("-m", "pip", "wheel", *options, ".", **env)


@pytest.mark.thorough
def test_kernels_inside(library: KernelLibrary, tmp_path: Path) -> None:
    assert library.path is not None
    for built in (library.path, *build_every_path()):
        copy_library(built, tmp_path / "kernels")

    made = wheel(tmp_path / "dist", QFUSE_WHEEL_KERNELS=str(tmp_path / "kernels"))
    assert made.returncode == 0, made.stderr
    (file,) = (tmp_path / "dist").iterdir()
    assert "none-any" not in file.name
    site = tmp_path / "site"
    with zipfile.ZipFile(file) as archive:
        archive.extractall(site)
    used = python(
        "-c", USING, path=str(site), CXX="/bin/false", QFUSE_CACHE_DIR=str(tmp_path / "cache")
    )

    assert used.returncode == 0, used.stderr
    path, compiled, total, same = used.stdout.split()
    assert Path(path).is_relative_to(site)
    assert (compiled, total, same) == ("False", "24.0", "True")
    assert not (tmp_path / "cache" / "kernels").exists()


def test_without_kernels_it_is_pure_python(tmp_path: Path) -> None:
    built = wheel(tmp_path, QFUSE_WHEEL_KERNELS="")

    assert built.returncode == 0, built.stderr
    (file,) = tmp_path.iterdir()
    assert file.name.endswith("py3-none-any.whl")
    with zipfile.ZipFile(file) as archive:
        assert [name for name in archive.namelist() if name.endswith(".so")] == []
        assert any(name.endswith("csrc/register.cpp") for name in archive.namelist())


def test_a_folder_without_kernels_is_refused(tmp_path: Path) -> None:
    built = wheel(tmp_path / "dist", QFUSE_WHEEL_KERNELS=str(tmp_path))

    assert built.returncode != 0
    assert "qfuse build-kernels --into" in built.stderr + built.stdout
