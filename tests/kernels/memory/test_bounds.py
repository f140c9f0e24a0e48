"""No kernel touches memory behind or before its operands: pages without access lie there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.cases.glu import halves
from tests.support.cases.linear_kernel import STORED, codes, linear
from tests.support.cases.rowwise_kernel import dynamic
from tests.support.guard_pages import assert_same_with_guards, guarded

from qfuse.kernels import (
    linear_w4a8,
    linear_w4a16,
    linear_w8a8,
    linear_w8a8_grouped,
    linear_w8a8_quantized,
    linear_w8a8_rows,
    linear_w8a16,
    linear_w16a32,
    pack_floats,
    pack_grouped,
    pack_groups,
    pack_weight,
    pack_weight4,
)
from qfuse.kernels.rowwise import (
    RowwiseOutput,
    activation_quantized,
    layer_norm_quantized,
    rms_norm_quantized,
)

ROOT = Path(__file__).parents[3]
ROWS = (1, 2, 3, 4, 5, 7, 17, 70)
# N and K around vectors, blocks and groups; the last lines have nothing to pad.
SIZES = ((1, 1), (3, 5), (15, 62), (17, 63), (63, 65), (65, 129), (130, 516), (64, 64))
GROUPED = ((1, 8), (15, 64), (65, 96), (130, 192))


def wide(x: torch.Tensor, more: int) -> torch.Tensor:
    """The same rows, further apart."""
    return torch.nn.functional.pad(x, (0, more))[..., : x.shape[-1]]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", STORED)
def test_linear_w8a8(isa: str, rows: int, dtype: torch.dtype) -> None:
    del isa
    for n, k in SIZES:
        case = linear((rows, k), n, dtype=dtype, zero_point=True, weight_zero_point=True)
        extras = [
            torch.randn(rows, n), torch.randn(n), wide(torch.randn(rows, n), 3), codes((rows, n), dtype),
        ]  # fmt: skip
        text = "act(gelu)|add(0,0.5)|mul(1)|add(2,1.0)|mul(3,0.1,7)"
        case = replace(case, x=wide(case.x, k % 7)).with_options(extras=extras, epilogue=text)
        args, options = case.arguments()

        assert_same_with_guards(linear_w8a8, args, options)


@pytest.mark.parametrize("rows", ROWS)
def test_linear_w8a8_quantized(isa: str, rows: int) -> None:
    del isa
    for n, k in SIZES:
        args, options = linear((rows, k), n).arguments()
        output = {
            "out_scale": torch.tensor([0.05]), "out_zero_point": torch.tensor([3]),
            "quant_min": -128, "quant_max": 127, "out_dtype": torch.int8,
        }  # fmt: skip

        assert_same_with_guards(linear_w8a8_quantized, args, {**options, **output})


@pytest.mark.parametrize("rows", ROWS)
def test_linear_w8a8_of_halves_and_rows(isa: str, rows: int) -> None:
    del isa
    for h, k in SIZES:
        args, options = halves((rows, k), h, zero_point=True).arguments()

        assert_same_with_guards(linear_w8a8, args, options)
        assert_same_with_guards(linear_w8a8_rows, args, {**options, "output": dynamic(keep=True)})


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_linear_w8a16(isa: str, rows: int, dtype: torch.dtype) -> None:
    del isa
    for n, k in SIZES:
        packed, _ = pack_weight(codes((n, k), torch.int8))
        args = (wide(torch.randn(rows, k).to(dtype), k % 5), packed, torch.rand(n))
        extras = [torch.randn(rows, n).to(dtype)]

        assert_same_with_guards(
            linear_w8a16, args, {"bias": torch.randn(n), "extras": extras, "epilogue": "mul(0)"}
        )


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("four", [True, False])
def test_linear_grouped(isa: str, rows: int, groups: int, four: bool) -> None:
    del isa
    op = linear_w4a8 if four else linear_w8a8_grouped
    for n, size in GROUPED:
        k = groups * size
        stored = (
            torch.randint(0, 16, (n, k), dtype=torch.uint8) if four else codes((n, k), torch.int8)
        )
        zero = torch.randint(-8, 16, (n, groups))
        packed = pack_grouped(stored, torch.rand(n, groups), zero)
        x = wide(codes((rows, k), torch.int8), k % 3)
        x_zero = torch.randint(-9, 9, (rows,), dtype=torch.int32)
        options = {"out_features": n, "bias": torch.randn(n)}

        for dtype in (torch.int16, torch.int32):
            weight = packed._replace(sums=packed.sums.to(dtype))
            assert_same_with_guards(op, (x, torch.rand(rows), x_zero, *weight), options)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [1, 2])
def test_weight_only_in_groups(isa: str, rows: int, dtype: torch.dtype, groups: int) -> None:
    del isa
    for n, size in GROUPED:
        k = groups * size
        x = wide(torch.randn(rows, k).to(dtype), k % 3)
        scale, offset = (pack_groups(torch.rand(n, groups)) for _ in range(2))
        four = pack_weight4(torch.randint(0, 16, (n, k), dtype=torch.uint8))
        eight, _ = pack_weight(codes((n, k), torch.int8))
        options = {"out_features": n, "bias": torch.randn(n), "w_offset": offset}
        zeros = torch.randint(0, 16, (n, groups))

        for type_, op, weight in (
            (torch.uint8, linear_w4a16, four),
            (torch.int8, linear_w8a16, eight),
        ):
            with_zeros = {**options, "w_zero_point": pack_groups(zeros.to(type_))}
            for given in (options, with_zeros):
                assert_same_with_guards(op, (x, weight, scale), given)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16])
def test_float_weights(isa: str, rows: int, dtype: torch.dtype) -> None:
    del isa
    op = linear_w16a32 if dtype is torch.float16 else linear_w8a16
    for n, k in SIZES:
        packed = pack_floats(torch.randn(n, k).to(dtype))
        x = wide(torch.randn(rows, k), k % 3)
        assert_same_with_guards(op, (x, packed, torch.rand(n)), {"out_features": n})


COLUMNS = (1, 2, 15, 17, 63, 65, 130)
GIVEN = dynamic(formula="", scale=torch.tensor([0.05]), zero_point=torch.tensor([3]), keep=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("output", [GIVEN, dynamic(keep=True)], ids=["given", "chosen"])
def test_row_kernels(isa: str, dtype: torch.dtype, output: RowwiseOutput) -> None:
    del isa
    for columns in COLUMNS:
        x = wide(torch.randn(5, columns).to(dtype), columns % 4)
        residual, weight = torch.randn(5, columns).to(dtype), torch.rand(columns).to(dtype)
        kept = replace(output, keep_sum=True)

        assert_same_with_guards(rms_norm_quantized, (x, weight, 1e-5, kept), {"residual": residual})
        assert_same_with_guards(
            layer_norm_quantized, (x, weight, weight, 1e-5, kept), {"residual": residual}
        )
        assert_same_with_guards(
            activation_quantized, (x, "act(silu)|mul(0)", output, [residual]), {}
        )
        q, scale = torch.randint(-128, 128, (5, columns), dtype=torch.int8), torch.rand(5, 1)
        zero = torch.zeros(5, 1, dtype=torch.int32)
        assert_same_with_guards(
            rms_norm_quantized,
            (q, weight, 1e-5, kept),
            {"x_scale": scale, "x_zero_point": zero, "x_dtype": dtype, "residual": residual},
        )


def test_a_guard_ends_the_process() -> None:
    """The net holds: one byte too far is a segmentation fault, on either side."""
    # A sanitizer would answer the fault with a report and an exit of its own.
    sanitizer = f"{os.environ.get('ASAN_OPTIONS', '')}:handle_segv=0"
    for at_start, index in ((False, 4), (True, -1)):
        code = (
            "import ctypes, torch; from tests.support.guard_pages import guarded; "
            f"x = guarded(torch.arange(4, dtype=torch.uint8), at_start={at_start}); "
            "first = ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_uint8)); "
            f"print(first[0], flush=True); first[{index}]"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={
                **os.environ,
                "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
                "ASAN_OPTIONS": sanitizer,
            },
            capture_output=True, text=True, check=False, timeout=100,
        )  # fmt: skip

        assert (done.stdout, done.returncode) == ("0\n", -signal.SIGSEGV), done.stderr


def test_a_guarded_copy_is_the_same(library: object) -> None:
    del library
    for tensor in (
        torch.randn(3, 5), torch.randn(5, 3).t(), torch.randn(4, 9)[:, ::2], torch.randn(1, 7).expand(4, 7),
        torch.randn(0, 3), torch.tensor(2.0), torch.randn(7).as_strided((3, 4), (1, 1)),
    ):  # fmt: skip
        for at_start in (False, True):
            copy = guarded(tensor, at_start=at_start)

            assert torch.equal(copy, tensor)
            assert copy.stride() == tensor.stride() or tensor.numel() == 0
