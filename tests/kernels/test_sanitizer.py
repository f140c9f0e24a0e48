"""The sanitizers see what a kernel does wrong; without that a clean run says nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import qfuse.kernels.build
from qfuse.kernels import find_kernel_compiler

ROOT = Path(__file__).parents[2]
SOURCES = Path(qfuse.kernels.build.__file__).with_name("csrc")
# Calls a kernel whose last vector of scales is not whole, and which needs all of its operands.
CALLING = """
import sys, torch
from pathlib import Path
from qfuse import kernels
from qfuse.kernels.build import build
compiler, sources = kernels.find_kernel_compiler(), Path(sys.argv[1])
path, _ = build(compiler, sources=sources)
torch.ops.load_library(str(path))
for part in torch.ops.qfuse.missing_kernels(""):
    path, _ = build(compiler, part, sources=sources)
    torch.ops.qfuse.load_kernels(part, str(path))
packed, sums = kernels.pack_weight(torch.ones(5, 8, dtype=torch.int8))
x, one = torch.ones(3, 8, dtype=torch.int8), torch.ones(1)
print(kernels.linear_w8a8(x, one, None, packed, sums, torch.ones(5)).sum().item())
"""
SMALL = """
extern "C" __attribute__((visibility("default"))) int sum(const int* values, int count) {
  int total = 0;
  for (int i = 0; i <= count; ++i) total += values[i];
  return total;
}
"""
# Where vectors that may not be whole are read and written, by file.
WHERE_COUNTED = {
    "columns.h": ["load<Floats>(e.w_scale + at, count)"],
    "finish.h": [
        "store(out + v * kLanes, convert(y), count)",
        "store(out + first + v * kLanes, f(y[v]), count)",
    ],
}
SUMMING = """
import ctypes, sys, torch
from pathlib import Path
from qfuse.kernels.build import build
from qfuse.kernels import find_kernel_compiler
path, _ = build(find_kernel_compiler(), sources=Path(sys.argv[1]))
for size in (4, 3):
    values = torch.ones(size, dtype=torch.int32)
    print(ctypes.CDLL(str(path)).sum(ctypes.c_void_p(values.data_ptr()), 3), flush=True)
"""


def run(code: str, *args: str, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python code with sanitized kernels, in a process of its own."""
    where = {} if cache is None else {"QFUSE_CACHE_DIR": str(cache)}
    return subprocess.run(
        ["sh", str(ROOT / "tools" / "with-asan"), sys.executable, "-c", code, *args],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "LD_PRELOAD": "", **where},
        capture_output=True, text=True, check=False, timeout=3500,
    )  # fmt: skip


@pytest.mark.thorough
@pytest.mark.slow
def test_reading_past_an_operand_ends_the_process(tmp_path: Path) -> None:
    if find_kernel_compiler() is None:
        pytest.skip("needs a C++ compiler")
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "sum.cpp").write_text(SMALL)
    ran = run(SUMMING, str(sources), cache=tmp_path)
    if "has no lib" in ran.stderr:
        pytest.skip(ran.stderr)

    assert ran.stdout == "4\n", f"only what is too short ends it: {ran.stderr}"
    assert ran.returncode != 0
    assert "heap-buffer-overflow" in ran.stderr


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.skipif(
    not os.environ.get("QFUSE_SANITIZE"), reason="builds all kernels anew: part of make asan"
)
@pytest.mark.parametrize("name", ["columns.h", "finish.h"])
def test_a_broken_kernel_is_caught(tmp_path: Path, name: str) -> None:
    """The sources as they are run clean; with a vector read or written whole where it is not, not."""
    right = run(CALLING, str(SOURCES))
    sources = tmp_path / "csrc"
    shutil.copytree(SOURCES, sources)
    text = (sources / "linear" / name).read_text()
    for good in WHERE_COUNTED[name]:
        assert text.count(good) == 1
        text = text.replace(good, good.replace("count", "kLanes"))
    (sources / "linear" / name).write_text(text)
    broken = run(CALLING, str(sources), cache=tmp_path)

    assert (right.stdout, right.returncode) == ("120.0\n", 0), right.stderr
    assert broken.returncode != 0
    # What an access to a whole vector is called depends on where in the memory it begins.
    found = re.search(r"AddressSanitizer: (heap-buffer-overflow|unknown-crash)", broken.stderr)
    assert found is not None, broken.stderr
