"""Linears and convolutions with weights of float8 and float16, on every instruction set."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from qfuse.ir.dtypes import FLOAT8, FLOATS
from qfuse.ir.errors import InputError
from qfuse.kernels import (
    convolution_w8a16,
    linear_w8a16,
    linear_w16a32,
    pack_floats,
    pack_groups,
    pack_values,
)

pytestmark = pytest.mark.numeric

ROWS = (1, 2, 3, 4, 5, 7, 65)
FEATURES = (1, 16, 63, 65, 130)
DEPTHS = (1, 2, 3, 4, 7, 66, 519)


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """All values of a type, with infinities and NaN, as a column."""
    bits = torch.arange(1 << (8 * dtype.itemsize), dtype=torch.int32)
    return bits.to(torch.int8 if dtype in FLOAT8 else torch.int16).view(dtype).reshape(-1, 1)


def product(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    op = linear_w16a32 if weight.dtype is torch.float16 else linear_w8a16
    y: torch.Tensor = op(x, pack_floats(weight), scale, out_features=weight.shape[0], bias=bias)
    return y


def check(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> None:
    exact = x.double() @ weight.double().t() + bias.double()
    size = x.double().abs() @ weight.double().abs().t() + bias.double().abs()
    last = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[x.dtype]
    # float16 rounds subnormals to multiples of its least one.
    least = 2.0**-24 if x.dtype is torch.float16 else 0.0
    allowed = 4 * torch.finfo(torch.float32).eps * size + last * exact.abs() + least
    assert y.dtype == x.dtype
    assert ((y.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [*FLOAT8, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_every_value_is_widened_exactly(isa: str, dtype: torch.dtype, rows: int) -> None:
    del isa
    weight = every_value(dtype)
    for real in FLOATS if dtype in FLOAT8 else (torch.float32,):
        y = product(torch.ones(rows, 1, dtype=real), weight, torch.ones(len(weight)))
        expected = weight.float().reshape(1, -1).expand(rows, -1).to(real)
        assert torch.equal(y.isnan(), expected.isnan())
        assert torch.equal(y.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


@pytest.mark.parametrize("dtype", [*FLOAT8, torch.float16])
@pytest.mark.parametrize("rows", ROWS)
def test_every_size(isa: str, dtype: torch.dtype, rows: int) -> None:
    del isa
    for n, k in itertools.product(FEATURES, DEPTHS):
        for real in FLOATS if dtype in FLOAT8 else (torch.float32,):
            x, weight = torch.randn(rows, k).to(real), torch.randn(n, k).to(dtype)
            scale, bias = torch.rand(n) * 0.1 + 0.01, torch.randn(n)
            y = product(x, weight, scale, bias)
            check(y, x, weight.double() * scale.double()[:, None], bias)


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 33])
def test_groups(isa: str, dtype: torch.dtype, rows: int) -> None:
    del isa
    for n, groups, size in ((1, 2, 8), (17, 20, 16), (70, 5, 16)):
        x, weight = torch.randn(rows, groups * size), torch.randn(n, groups * size).to(dtype)
        scale = torch.rand(n, groups) * 0.1 + 0.01
        y = linear_w8a16(x, pack_floats(weight), pack_groups(scale), out_features=n)
        check(y, x, weight.double() * scale.double().repeat_interleave(size, 1), torch.zeros(n))


@pytest.mark.parametrize("dtype", FLOAT8)
def test_large_activations_do_not_overflow_between(isa: str, dtype: torch.dtype) -> None:
    del isa
    weight = torch.full((64, 8), torch.finfo(dtype).max).to(dtype)
    for rows in (1, 4):
        x = torch.full((rows, 8), 1e30)
        y = product(x, weight, torch.full((64,), 1e-9))
        expected = torch.full((rows, 64), 8 * 1e21 * torch.finfo(dtype).max)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("groups", [1, 4, 16])
def test_convolutions(isa: str, dtype: torch.dtype, groups: int) -> None:
    del isa
    x, weight = torch.randn(2, 16, 9, 7), torch.randn(32, 16 // groups, 3, 3).to(dtype)
    scale = torch.rand(32) * 0.1 + 0.01
    y = convolution_w8a16(
        x, pack_values(weight), scale, out_channels=32,
        kernel=[3, 3], stride=[2, 1], padding=[1, 0], dilation=[1, 2], output_padding=[0, 0],
        groups=groups,
    )  # fmt: skip
    real = (weight.double() * scale.double()[:, None, None, None]).float()
    expected = F.conv2d(x, real, None, [2, 1], [1, 0], [1, 2], groups)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


def test_what_does_not_go_together() -> None:
    x, packed = torch.randn(2, 8), pack_floats(torch.randn(64, 8).to(torch.float8_e5m2))
    zero = torch.zeros(64, dtype=torch.int8)
    half = pack_floats(torch.randn(64, 8).half())
    cases: tuple[tuple[Any, ...], ...] = (
        (linear_w8a16, x, packed, {"w_zero_point": zero}, "neither zero points nor offsets"),
        (linear_w16a32, x.half(), half, {}, "multiply.*activations of float32|multiply float32"),
        (linear_w8a16, x, half, {}, "does not fit|cannot have type"),
    )
    for op, rows, weight, options, text in cases:
        # The op when it runs, and its shape function when torch traces it.
        for device in ("cpu", "meta"):
            given = [t.to(device) for t in (rows, weight, torch.ones(64))]
            more = {name: value.to(device) for name, value in options.items()}
            with pytest.raises((InputError, RuntimeError), match=text):
                op(*given, **more)
    with pytest.raises(InputError, match="must be float8 or float16"):
        pack_floats(torch.randn(64, 8))
