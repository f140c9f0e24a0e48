"""Kernels and oneDNN in one process: both use the tiles of AMX, whose shapes are the thread's.

Sizes, strides and padding have tests of their own: all depths and features in test_linear_w8a8 and
test_linear_w8a16, rows of any stride in test_strides, layouts in test_pack.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import pytest
import torch
import torch.nn.functional as F
from tests.support.cases.linear_kernel import STORED, codes, linear

from qfuse.kernels import (
    KernelLibrary,
    attention,
    linear_w4a8,
    linear_w4a16,
    linear_w8a16,
    pack_grouped,
    pack_weight4,
)
from qfuse.kernels import pack_weight as pack

ROOT = Path(__file__).parents[2]
ROWS = (1, 3, 40, 300)


def run(code: str, **env: str) -> str:
    """Run Python code in a process of its own, and return what it prints."""
    source = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONPATH": source, **env},
        capture_output=True, text=True, check=False, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def exact_int8(rows: int) -> None:
    case = linear((rows, 128), 130, zero_point=True)
    assert torch.equal(case.run(), case.expected())


def right_real(rows: int) -> None:
    weight, x = codes((130, 128), torch.int8), torch.randn(rows, 128).bfloat16()
    y = linear_w8a16(x, pack(weight)[0], torch.ones(130)).float()
    torch.testing.assert_close(y, x.float() @ weight.float().t(), rtol=0.02, atol=2.0)


def right_four(rows: int) -> None:
    weight, x = torch.randint(0, 16, (130, 128), dtype=torch.uint8), torch.randn(rows, 128)
    x = x.bfloat16()
    y = linear_w4a16(x, pack_weight4(weight), torch.ones(130)).float()
    torch.testing.assert_close(y, x.float() @ (weight.float() - 8).t(), rtol=0.02, atol=0.5)


def exact_grouped(rows: int) -> None:
    weight = torch.randint(0, 16, (130, 128), dtype=torch.uint8)
    x = codes((rows, 128), torch.int8)
    packed = pack_grouped(weight, torch.ones(130, 2))
    y = linear_w4a8(x, torch.ones(1), None, *packed, out_features=130)
    assert torch.equal(y, (x.long() @ weight.long().t()).float())


def right_attention(rows: int) -> None:
    # One head is computed by several threads, and 8 by one each.
    for heads in (1, 8):
        q = torch.randn(1, heads, rows, 64).bfloat16()
        y = attention(q, q, q, None, False, 0.125)
        wide = q.double()
        wide = F.scaled_dot_product_attention(wide, wide, wide)
        torch.testing.assert_close(y.double(), wide, rtol=0.02, atol=0.02)


KERNELS = {
    "attention": right_attention,
    "w8a8": exact_int8,
    "w8a16": right_real,
    "w4a16": right_four,
    "w4a8": exact_grouped,
}


@pytest.fixture(params=sorted(KERNELS))
def check_kernel(request: pytest.FixtureRequest) -> Callable[[int], None]:
    return KERNELS[str(request.param)]


def check_onednn() -> None:
    """Products of oneDNN that die or lie if a kernel left its tiles in the processor."""
    a, b = codes((40, 64), torch.int8), codes((64, 64), torch.int8)
    assert torch.equal(torch._int_mm(a, b).long(), a.long() @ b.long())
    x = torch.randn(40, 64).bfloat16()
    torch.testing.assert_close((x @ x.t()).float(), x.float() @ x.float().t(), rtol=0.02, atol=0.1)


class TestRelease:
    @pytest.mark.parametrize("rows", ROWS)
    def test_onednn_works_behind_every_kernel(
        self, isa: str, check_kernel: Callable[[int], None], rows: int
    ) -> None:
        del isa
        for _ in range(2):
            check_kernel(rows)
            check_onednn()

    def test_on_every_thread(self, isa: str, check_kernel: Callable[[int], None]) -> None:
        """Each thread has a processor state of its own."""
        del isa

        def both(rows: int) -> None:
            check_kernel(rows)
            check_onednn()

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(both, ROWS * 4))
        check_onednn()

    def test_many_short_lived_threads(self, isa: str, check_kernel: Callable[[int], None]) -> None:
        """Each begins without tiles."""
        del isa
        failures: list[BaseException] = []

        def work(rows: int) -> None:
            try:
                check_kernel(rows)
            except BaseException as error:  # noqa: BLE001 - it is raised below
                failures.append(error)

        for index in range(60):
            thread = Thread(target=work, args=(ROWS[index % len(ROWS)],))
            thread.start()
            thread.join()

        assert failures == []


@pytest.mark.parametrize("dtype", STORED)
def test_the_least_activations_are_exact(isa: str, dtype: torch.dtype) -> None:
    """Only AMX multiplies signed bytes as they are."""
    del isa
    case = linear((40, 64), 64, dtype=dtype)
    case.x.fill_(torch.iinfo(dtype).min)

    assert torch.equal(case.run(), case.expected())


@pytest.mark.thorough
@pytest.mark.slow
def test_a_process_that_never_had_onednn() -> None:
    code = (
        "import torch; torch.backends.mkldnn.enabled = False; from qfuse.kernels import load; "
        "from tests.kernels.test_traps import exact_int8, ROWS; print(load().available); "
        "[exact_int8(rows) for rows in ROWS]"
    )

    assert run(code) == "True\n"


EVERYTHING = """
from qfuse.kernels import instruction_set, load
from tests.kernels.test_traps import KERNELS, ROWS
for name in load().instruction_sets:
    with instruction_set(name):
        for check_kernel in KERNELS.values():
            for rows in ROWS:
                check_kernel(rows)
    print(name)
"""


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("limit", ["AVX512_CORE_VNNI", "AVX512_CORE", "AVX2"])
def test_onednn_may_be_limited(library: KernelLibrary, limit: str) -> None:
    """The kernels are those of the processor."""
    names = run(EVERYTHING, ONEDNN_MAX_CPU_ISA=limit).split()

    assert names == list(library.instruction_sets)
