"""Rows of few that are multiplied as digits: no value is lost, whatever else is in its row."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from tests.support.cases.linear_kernel import REAL, codes
from tests.support.cases.weight_only import (
    LEAST_FLOAT32,
    PRODUCT_EPSILONS,
    ROUNDING,
    SUM_EPSILONS,
    WeightOnly,
    weight_only,
)
from tests.support.guard_pages import assert_same_with_guards

from qfuse.kernels import KernelLibrary, instruction_set, linear_w8a16
from qfuse.targets import limited_threads

pytestmark = pytest.mark.numeric

EPS = torch.finfo(torch.float32).eps
ROWS = (1, 2, 3, 4)
# Around groups of four, vectors of 16 and slices of 64 input features.
SHORT = (1, 3, 4, 15, 16, 17, 63, 65)
DEPTHS = (*SHORT, 130, 1030)


def eight(rows: int, k: int, n: int, dtype: torch.dtype = torch.float32) -> WeightOnly:
    return weight_only((rows, k), n, bits=8, dtype=dtype, bias=False)


def with_weight(case: WeightOnly, weight: torch.Tensor) -> WeightOnly:
    return replace(case, codes=weight.to(torch.int8), scale=torch.ones(len(weight), 1))


def spread_out(rows: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of many magnitudes; a float loop adds long rows of them with errors of the largest."""
    power = {torch.float16: 7.0}.get(dtype, 30.0)
    return (torch.randn(rows, k) * 2.0 ** ((2 * torch.rand(rows, k) - 1) * power)).to(dtype)


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("rows", ROWS)
def test_values_of_many_magnitudes(isa: str, rows: int, dtype: torch.dtype) -> None:
    del isa
    for index, k in enumerate(SHORT):
        case = weight_only(
            (rows, k), 70, bits=8, dtype=dtype, zero_point=index % 2 == 0, bias=index % 3 == 0
        )
        case = replace(case, x=spread_out(rows, k, dtype))

        case.check(case.run())


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("outliers", [1, 20, 400])
def test_outliers_whose_weights_are_zero(
    isa: str, rows: int, dtype: torch.dtype, outliers: int
) -> None:
    """They do not take bits from the others."""
    del isa
    factors = (30.0, 1000.0) if dtype is torch.float16 else (30.0, 1000.0, 1e6, 1e12)
    for factor, zero_point in itertools.product(factors, [False, True]):
        case = weight_only((rows, 1030), 70, bits=8, dtype=dtype, zero_point=zero_point, bias=False)
        case.x[:, :outliers] *= factor
        zero = 0 if case.zero_point is None else case.zero_point
        case.codes[:, :outliers] = zero

        case.check(case.run())


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("rows", ROWS)
def test_every_value_alone(isa: str, rows: int, dtype: torch.dtype) -> None:
    """Each output reads one input: values are right to the rounding of a product, not of the row."""
    del isa
    for x in (torch.randn(rows, 256).to(dtype), spread_out(rows, 256, dtype)):
        case = with_weight(eight(rows, 256, 256, dtype), torch.eye(256) * 127)
        case = replace(case, x=x)

        y = case.run(epilogue="cast(float32)", out_dtype=torch.float32)

        expected = x.double() * 127
        allowed = PRODUCT_EPSILONS * EPS + ROUNDING[dtype]
        finite = expected.abs() < torch.finfo(dtype).max
        assert ((y - expected).abs() <= allowed * expected.abs())[finite].all()


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("rows", ROWS)
def test_bits_that_digits_barely_hold(isa: str, rows: int, dtype: torch.dtype) -> None:
    """Significands of ones, powers of two, and values at both ends of the type."""
    del isa
    info = torch.finfo(dtype)
    ones = 2 - info.eps
    tiny = info.tiny * 2.0**20 if dtype is torch.bfloat16 else info.smallest_normal / 4
    for values in (
        [ones], [-ones], [ones, -ones, 1.0], [1.0, -1.0], [0.0], [-0.0, 0.0], [tiny], [tiny, -ones],
        [ones * 2.0**8, 2.0**-14], [0.0, ones * 2.0**13, 1.0],
    ):  # fmt: skip
        row = torch.tensor(values, dtype=torch.float64).repeat(40)[: 40 + len(values)]
        for weight in (
            codes((70, len(row)), torch.int8),
            torch.eye(len(row)),
            -torch.eye(len(row)),
        ):
            case = with_weight(eight(rows, len(row), len(weight), dtype), weight)
            # So that no sum leaves the range of float16.
            case = replace(case, x=row.to(dtype).repeat(rows, 1), scale=case.scale * 2.0**-14)

            case.check(case.run())


@pytest.mark.parametrize("power", [-149, -130, -126, -100, 90, 105])
@pytest.mark.parametrize("rows", [1, 2])
def test_ends_of_float32(isa: str, rows: int, power: int) -> None:
    """Subnormal values keep their bits, and large ones do not overflow before the result."""
    del isa
    x = torch.randint(1, 1000, (rows, 130)).double() * 2.0**power
    case = with_weight(eight(rows, 130, 70), codes((70, 130), torch.int8) // 16)
    case = replace(case, x=x.float())

    y = case.run()

    expected = x.float().double() @ case.codes.double().t()
    magnitude = x.double().abs() @ case.codes.double().abs().t()
    allowed = SUM_EPSILONS * EPS * magnitude + LEAST_FLOAT32
    assert ((y - expected).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("rows", [2, 3, 4])
def test_rows_do_not_see_each_other(isa: str, rows: int, dtype: torch.dtype) -> None:
    """Not a row that is not finite, nor one that digits do not hold, nor one of another number."""
    del isa
    case = eight(rows, 300, 70, dtype)
    others = [
        torch.full((300,), torch.nan), torch.full((300,), torch.inf), torch.zeros(300),
        spread_out(1, 300, torch.float32)[0], torch.randn(300) * 2.0 ** torch.randint(-9, 9, (300,)),
    ]  # fmt: skip
    results = []
    for other in others:
        x = case.x.clone()
        x[rows // 2] = other.to(dtype)
        results.append(replace(case, x=x).run())
    kept = [i for i in range(rows) if i != rows // 2]

    for y in results:
        assert torch.equal(y[kept], results[0][kept])
    assert results[0][rows // 2].isnan().all()
    assert not results[1][rows // 2].isfinite().any()
    assert torch.equal(results[2][rows // 2], torch.zeros(70, dtype=dtype))


@pytest.mark.parametrize("dtype", REAL)
def test_threads_do_not_change_a_bit(isa: str, dtype: torch.dtype) -> None:
    del isa
    case = eight(2, 1030, 330, dtype)
    case.x[:, ::40] *= 500

    def run(threads: int) -> torch.Tensor:
        with limited_threads(threads):
            return case.run()

    one, *others = map(run, (1, 2, 7))

    assert all(torch.equal(one, y) for y in others)


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("rows", ROWS)
def test_guard_pages(isa: str, rows: int, dtype: torch.dtype) -> None:
    """Rests read single weights, also those of the last input features."""
    del isa
    for k in DEPTHS:
        case = weight_only((rows, k), 70, bits=8, dtype=dtype, zero_point=k % 2 == 1)
        case.x[:, -1] *= 300
        case.x[:, ::30] *= 0.002
        args, options = case.arguments()

        assert_same_with_guards(linear_w8a16, args, options)


@pytest.fixture(params=["avx512_vnni", "amx_emulated", "amx"])
def with_digits(request: pytest.FixtureRequest, library: KernelLibrary) -> str:
    """An instruction set that multiplies digits."""
    name: str = request.param
    if name not in library.instruction_sets:
        pytest.skip(f"needs {name}")
    return name


@pytest.mark.parametrize("sign", [1, -1])
def test_the_longest_sums(with_digits: str, sign: int) -> None:
    """All digits and weights at their ends: the most that int32 has to hold, and one group more."""
    value = sign * (0x7F7F7F if sign > 0 else 0x808080)
    results = {}
    for k in (1 << 16, (1 << 16) + 4):
        case = with_weight(eight(1, k, 2), torch.tensor([[127], [-128]]).expand(2, k))
        case = replace(case, x=torch.full((1, k), float(value)))
        for name in (with_digits, "avx512"):
            with instruction_set(name):
                results[name, k] = case.run()

    exact = torch.tensor([[127, -128]]) * value * (1 << 16)
    assert torch.equal(results[with_digits, 1 << 16], exact.float())
    assert torch.equal(results[with_digits, (1 << 16) + 4], results["avx512", (1 << 16) + 4])


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("zero_point", [False, True])
def test_a_sum_is_rounded_once(with_digits: str, rows: int, zero_point: bool) -> None:
    """Whole numbers of 24 bits: the result is the float that is nearest to the exact sum."""
    case = weight_only((rows, 1030), 70, bits=8, zero_point=zero_point, bias=False)
    x = torch.randint(-(1 << 24), 1 << 24, (rows, 1030)).float()
    case = replace(case, x=x, scale=torch.ones(70, 1))
    with instruction_set(with_digits):
        y = case.run()

    exact = x.double() @ case.steps(torch.float64).t()
    assert torch.equal(y, exact.float())


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_are_exact(with_digits: str, rows: int, dtype: torch.dtype) -> None:
    """Every bit is in the digits, so what cancels is zero."""
    case = eight(rows, 1030, 70, dtype)
    half = (torch.randint(-255, 256, (rows, 515)) * 2.0 ** -torch.randint(0, 7, (rows, 515))).to(
        dtype
    )
    weight = codes((70, 515), torch.int8).clamp(min=-127)
    case = replace(case, x=torch.cat([half, half], 1), codes=torch.cat([weight, -weight], 1))
    with instruction_set(with_digits):
        y = case.run()

    assert torch.equal(y, torch.zeros(rows, 70, dtype=dtype))
