"""A linear that chooses a scale for each row: the same bits as the linear and the op of rows."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from tests.support.cases.glu import GluOrder, halves
from tests.support.cases.linear_kernel import REAL, STORED
from tests.support.cases.rowwise_kernel import assert_dynamic, dynamic

from qfuse.ir.quant.choose import Formula
from qfuse.kernels import KernelLibrary, instruction_set, linear_w8a8, linear_w8a8_rows, pack_weight
from qfuse.kernels.rowwise import RowwiseOutput, activation_quantized

pytestmark = pytest.mark.numeric

ROWS = (1, 2, 4, 5, 7, 13, 70)


def assert_same(case: GluOrder, output: RowwiseOutput) -> None:
    """One op gives what two give."""
    y = case.run()
    want = activation_quantized(y, "", output)
    for mine, other in zip(case.run_rows(output), want, strict=True):
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
        assert torch.equal(mine, other)


@pytest.mark.parametrize("rows", ROWS)
def test_every_size(isa: str, rows: int) -> None:
    del isa
    for h, k in itertools.product((1, 15, 64, 65, 130), (1, 4, 63, 129)):
        case = halves((rows, k), h, zero_point=True)
        got = case.run_rows(dynamic(keep=True))

        assert_dynamic(case.in_parts(), dynamic(), got)
        assert torch.equal(got[3], case.in_parts())


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("real", REAL)
@pytest.mark.parametrize("formula", ["ao-symmetric", "ao-asymmetric", "token-asymmetric"])
def test_formulas_types_and_what_is_kept(
    isa: str, dtype: torch.dtype, real: torch.dtype, formula: str
) -> None:
    del isa
    info = torch.iinfo(dtype)
    for keep, reciprocal, scale in itertools.product(
        (True, False), (True, False), (torch.float32, torch.float64, torch.bfloat16)
    ):
        output = dynamic(
            formula=formula, dtype=dtype, quant_min=info.min, quant_max=info.max,
            keep=keep, reciprocal=reciprocal, scale_dtype=scale, compute=real,
        )  # fmt: skip
        case = replace(halves((7, 20), 70, weight_zero_point=True), float_dtype=real)
        assert_same(case, output)
        assert_dynamic(case.in_parts(), output, case.run_rows(output))


def test_every_formula(isa: str) -> None:
    del isa
    for formula in Formula:
        if str(formula).startswith(("mx", "nvfp4", "ao-float8")):
            continue
        assert_same(halves((9, 20), 33), dynamic(formula=str(formula)))


def test_without_a_glu(isa: str) -> None:
    del isa
    for epilogue, n in (("act(gelu)", 70), ("", 64), ("add(0,1.0)|cast(bfloat16)", 65)):
        case = halves((2, 5, 36), n).linear
        extras = [torch.randn(2, 5, 2 * n)] if "add" in epilogue else []
        packed, sums = pack_weight(case.weight)
        args = (case.x, case.x_scale, None, packed, sums, case.w_scale)
        real = torch.bfloat16 if "cast" in epilogue else torch.float32
        y = linear_w8a8(*args, bias=case.bias, epilogue=epilogue, extras=extras, out_dtype=real)
        got = linear_w8a8_rows(
            *args, output=dynamic(keep=True), bias=case.bias, epilogue=epilogue, extras=extras,
            float_dtype=real,
        )  # fmt: skip
        assert torch.equal(got[3], y)
        assert_dynamic(y, dynamic(), got)


def test_a_given_scale(isa: str) -> None:
    del isa
    output = RowwiseOutput(
        quant_min=-127,
        quant_max=127,
        dtype=torch.int8,
        scale=torch.tensor(0.02),
        zero_point=torch.tensor(3),
        keep=True,
    )
    assert_same(halves((9, 20), 33), output)


def test_many_strips(isa: str) -> None:
    """More rows than fit into the scratch memory at a time."""
    del isa
    assert_same(halves((301, 8), 4100), dynamic())


def test_rows_that_are_not_finite(isa: str) -> None:
    del isa
    case = halves((7, 20), 70)
    scale = case.linear.x_scale.clone()
    scale[1], scale[4] = torch.nan, torch.inf
    output = dynamic(formula="ao-asymmetric", keep=True)
    case = replace(case, linear=replace(case.linear, x_scale=scale))
    got = case.run_rows(output)
    want = activation_quantized(case.run(), "", output)
    for mine, other in zip(got, want, strict=True):
        assert torch.equal(mine.nan_to_num(7.5), other.nan_to_num(7.5))
    finite = [0, 2, 3, 5, 6]
    assert got[3][finite].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (4, 0), (20,), (2, 1, 4, 20)])
def test_ranks_and_empty_rows(isa: str, shape: tuple[int, ...]) -> None:
    del isa
    assert_same(halves(shape, 10, per_token=False), dynamic(keep=True))


def test_no_features(isa: str) -> None:
    del isa
    got = halves((3, 8), 0).run_rows(dynamic())
    assert (got[0].shape, got[1].shape) == ((3, 0), (3, 1))


def test_rows_that_repeat(isa: str) -> None:
    del isa
    case = halves((1, 20), 70, per_token=False)
    spread = replace(case, linear=replace(case.linear, x=case.linear.x.expand(9, 20)))
    got, one = spread.run_rows(dynamic()), case.run_rows(dynamic())
    assert torch.equal(got[0], one[0].expand(9, 70))
    assert torch.equal(got[1], one[1].expand(9, 1))


def test_paths_and_threads_agree_bit_for_bit(library: KernelLibrary) -> None:
    for rows in (3, 301):
        case = halves((rows, 200), 203, zero_point=True)
        before, results = torch.get_num_threads(), []
        for name in library.instruction_sets:
            with instruction_set(name):
                for threads in (1, 2, 8):
                    torch.set_num_threads(threads)
                    results.append(case.run_rows(dynamic(keep=True)))
        torch.set_num_threads(before)
        assert len(results) == 3 * len(library.instruction_sets)
        for other in results[1:]:
            assert all(map(torch.equal, results[0], other))


def test_refuses(library: KernelLibrary) -> None:
    del library
    case = halves((3, 8), 6)
    args, options = case.arguments()
    with pytest.raises(RuntimeError, match="no sum to keep"):
        case.run_rows(dynamic(keep_sum=True))
    with pytest.raises(RuntimeError, match="the epilogue gives Float"):
        linear_w8a8_rows(*args, **{**options, "output": dynamic(), "float_dtype": torch.bfloat16})
    with pytest.raises(RuntimeError, match="codes must be"):
        case.run_rows(dynamic(dtype=torch.int16))
    with pytest.raises(RuntimeError, match="either out_scale or a formula"):
        case.run_rows(dynamic(formula=""))
