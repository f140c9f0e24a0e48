"""The tiles of AMX: no thread keeps them, and emulated ones give the same integers."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.kernels.test_traps import KERNELS, ROWS
from tests.support.cases.linear_kernel import STORED, linear
from tests.support.machine import needs
from tests.support.processes import run_python

from qfuse.kernels import KernelLibrary, find_kernel_compiler, instruction_set

# XINUSE, which says what state of the processor a thread uses, and tile shapes of one byte.
STATE = """
extern "C" {
unsigned state(void) {
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(1));
  return low;
}
void use_tiles(void) {
  unsigned char shapes[64] __attribute__((aligned(64))) = {1};
  shapes[16] = 4;
  shapes[48] = 1;
  __asm__ volatile(".byte 0xc4, 0xe2, 0x78, 0x49, 0x00" ::"a"(shapes) : "memory");
}
void release_tiles(void) { __asm__ volatile(".byte 0xc4, 0xe2, 0x78, 0x49, 0xc0"); }
}
"""
TILES = 3 << 17


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory, library: KernelLibrary) -> Any:
    """What a thread uses."""
    needs("amx_tile", "amx_int8", "amx_bf16")
    assert "amx" in library.instruction_sets
    compiler = find_kernel_compiler()
    assert compiler is not None, "the kernels were compiled"
    folder = tmp_path_factory.mktemp("state")
    source, made = folder / "state.cpp", folder / "state.so"
    source.write_text(STATE)
    subprocess.run([*compiler.command, "-shared", "-fPIC", source, "-o", made], check=True)
    return ctypes.CDLL(str(made))


def test_tiles_in_use_are_seen(state: Any) -> None:
    state.use_tiles()
    used = state.state() & TILES
    state.release_tiles()

    assert used
    assert not state.state() & TILES


@pytest.mark.parametrize("kernel", sorted(KERNELS))
@pytest.mark.parametrize("rows", ROWS)
def test_no_thread_keeps_tiles(state: Any, kernel: str, rows: int) -> None:
    check_kernel: Callable[[int], None] = KERNELS[kernel]

    def left() -> int:
        check_kernel(rows)
        return int(state.state()) & TILES

    with instruction_set("amx"), ThreadPoolExecutor(1) as pool:
        assert left() == 0
        assert pool.submit(left).result() == 0


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("k", [4, 60, 64, 68, 96, 100, 128, 1021])
def test_emulated_tiles_give_the_same_integers(
    library: KernelLibrary, dtype: torch.dtype, k: int
) -> None:
    del library
    needs("amx_tile", "amx_int8", "amx_bf16")
    for rows in (1, 15, 16, 17, 31, 32, 33, 70):
        case = linear((rows, k), 66, dtype=dtype, zero_point=True)
        results = []
        for name in ("amx", "amx_emulated"):
            with instruction_set(name):
                results.append(case.run())

        assert torch.equal(*results)
        assert torch.equal(results[0], case.expected())


# The kernel of Linux refuses the state of tiles to a process one of whose signal stacks cannot
# hold it.
WITHOUT_TILES = """
import ctypes

class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

space = ctypes.create_string_buffer(4096)
stack = Stack(ctypes.addressof(space), 0, 4096)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0

import torch
from qfuse.kernels import linear_w8a8, load, pack_weight
from qfuse.targets import Target, diagnose

assert load().instruction_sets[-1] == "avx512_vnni"
assert "AMX" in [found.what for found in diagnose(Target.detect())]
x, weight = (torch.randint(-128, 128, (n, 256), dtype=torch.int8) for n in (70, 64))
result = linear_w8a8(x, torch.ones(70), None, *pack_weight(weight), torch.ones(64))
assert torch.equal(result.double(), x.double() @ weight.double().t())
"""


@pytest.mark.thorough
def test_a_process_without_tiles_takes_the_next_best_path() -> None:
    needs("amx_tile", "amx_int8", "amx_bf16")

    done = run_python(WITHOUT_TILES, QFUSE_ISA="")

    assert done.returncode == 0, done.stderr
