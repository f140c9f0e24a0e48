"""What torch believes about the grouped ops while it traces is what they do, packages included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.cases.fake_kernels import OPCHECKS, to_meta
from tests.support.cases.linear_grouped import BITS, grouped
from tests.support.cases.linear_kernel import REAL, STORED

from qfuse.ir.errors import InputError
from qfuse.kernels import (
    KernelLibrary,
)

K, N = 48, 70


def call(shape: tuple[int, ...], bits: int, out: torch.dtype, **kind: Any) -> tuple[Any, list[Any]]:
    """An op and every argument of it, by position."""
    case = grouped(shape, N, 3, bits=bits, weight_zeros="each", **kind)
    args, options = case.arguments()
    extra = torch.randn(*shape[:-1], N, dtype=torch.bfloat16)
    rest = [options["out_features"], case.bias, [extra], "add(0,1.0)|cast(float32)", torch.bfloat16]
    ops = torch.ops.qfuse
    if out.is_floating_point:
        op = ops.linear_w4a8 if case.four else ops.linear_w8a8_grouped
        rest[3] = f"cast({str(out).removeprefix('torch.')})"
        return op.default, [*args, *rest, out]
    op = ops.linear_w4a8_quantized if case.four else ops.linear_w8a8_grouped_quantized
    low = torch.iinfo(out).min
    output = [torch.tensor([0.1]), torch.tensor([1]), low, low + 255, True, False, out]
    return op.default, [*args, *rest, *output]


@pytest.mark.parametrize("shape", [(5, K), (2, 3, K), (K,)])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("out", [torch.float32, torch.int8])
def test_opcheck(
    library: KernelLibrary, shape: tuple[int, ...], bits: int, out: torch.dtype
) -> None:
    del library
    op, args = call(shape, bits, out, zero_point=True)
    torch.library.opcheck(op, tuple(args), test_utils=OPCHECKS)


@pytest.mark.parametrize("shape", [(5, K), (K,), (0, K), (1, 1, K)])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("out", [*REAL, *STORED])
def test_fake_results_are_like_real_ones(
    library: KernelLibrary, shape: tuple[int, ...], bits: int, out: torch.dtype
) -> None:
    del library
    op, args = call(shape, bits, out)
    real = op(*args)
    meta = op(*to_meta(args))

    assert meta.device.type == "meta"
    assert (meta.shape, meta.dtype, meta.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.ones(5, K), "x must be int8 or uint8"),
        (0, torch.ones(5, 64, dtype=torch.int8), "does not fit"),
        (3, torch.ones(2, 6, 64, 4, dtype=torch.int8), "does not fit"),
        (4, torch.zeros(2, 2, 64, dtype=torch.int32), "w_sums .* does not fit"),
        (6, torch.zeros(2, 2, 64, dtype=torch.int8), "w_zero_point .* does not fit"),
        (7, 129, "does not fit"),
        (7, -1, "out_features cannot be -1"),
        (0, torch.ones((), dtype=torch.int8), "at least one axis"),
        (1, torch.ones(1, dtype=torch.int32), "x_scale must be float"),
        (4, torch.zeros(2, 3, 64), "w_sums must be torch.int16 or torch.int32"),
        (5, torch.ones(70), r"w_scale \(70,\) must be \[blocks, groups, 64\]"),
        (5, torch.ones(2, 0, 64), "must be .blocks, groups, 64"),
        (5, torch.ones(2, 5, 64), "5 groups of K = 48"),
        (5, torch.ones(2, 4, 64), "4 groups of K = 48"),
        (5, torch.ones(2, 3, 64, dtype=torch.float64), "w_scale must be torch.float32"),
        (6, torch.zeros(2, 3, 64, dtype=torch.int32), "w_zero_point must be torch.int8"),
        (6, torch.zeros(1), "w_zero_point must be torch.int8"),
        (8, torch.ones(4), "bias has 4 elements"),
        (8, torch.ones(70, dtype=torch.int8), "bias must be float"),
        (11, torch.float64, "product_dtype must be one of"),
        (-1, torch.int8, "the result must be one of"),
    ],
)
def test_fakes_refuse_what_cannot_be(
    library: KernelLibrary, index: int, value: Any, message: str
) -> None:
    del library
    op, args = call((5, K), 4, torch.float32)
    args[index] = value
    meta = to_meta(args)

    with pytest.raises(InputError, match=message):
        op(*meta)
    with pytest.raises(RuntimeError):
        op(*args)


def test_fakes_refuse_groups_whose_sums_do_not_fit(library: KernelLibrary) -> None:
    del library
    op, args = call((5, K), 8, torch.float32)
    k = (1 << 15) + 4
    args[0] = torch.ones(5, k, dtype=torch.int8)
    args[3] = torch.ones(2, k // 4, 64, 4, dtype=torch.int8)
    args[4:7] = [torch.ones(2, 1, 64, dtype=torch.int32), torch.ones(2, 1, 64), None]
    meta = to_meta(args)

    with pytest.raises(InputError, match="at most 32768 fit int32"):
        op(*meta)
    with pytest.raises(RuntimeError, match="up to 32768"):
        op(*args)
