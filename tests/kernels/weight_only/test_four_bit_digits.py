"""A row that multiplies 4-bit weights as digits: no value is lost, whatever else is in its row."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from tests.support.cases.linear_kernel import REAL
from tests.support.cases.weight_only import (
    LEAST_FLOAT32,
    PRODUCT_EPSILONS,
    ROUNDING,
    WeightOnly,
    weight_only,
)
from tests.support.guard_pages import assert_same_with_guards

from qfuse.kernels import KernelLibrary, instruction_set, linear_w4a16
from qfuse.targets import limited_threads

pytestmark = pytest.mark.numeric

EPS = torch.finfo(torch.float32).eps
# Input features and groups: groups of every length that is a multiple of 8, whole and cut into
# segments of 256; a last word that is not full; and what takes the float loop.
SHAPES = (
    (1, 1), (7, 1), (8, 1), (15, 1), (16, 1), (17, 1), (31, 1), (63, 1), (255, 1), (257, 1), (1030, 1),
    (64, 8), (64, 4), (72, 3), (96, 3), (160, 5), (256, 2), (528, 2), (1056, 2),
)  # fmt: skip

# A float loop adds long rows of many magnitudes with errors of the largest.
SHORT = [(k, groups) for k, groups in SHAPES if k <= 96]


def bound(case: WeightOnly) -> torch.Tensor:
    """What the sums of one row may be off by, per output, see docs/adr/0036."""
    x, groups = case.x.double(), case.scale.shape[1]
    k = x.shape[1]
    group = k // groups
    terms = case.steps(torch.float64).abs() * case.spread(case.scale).double()
    segments = groups * -(-group // 256)
    # Dropped parts and the conversion of segments; the sum of segments; rests; the result.
    roundings = 1 + 4 + segments + min(group, 256) / 8 + 1 + 2
    allowed = roundings * EPS / 2 * (x.abs() @ terms.t())
    return allowed + ROUNDING[case.x.dtype] * (x @ case.unrounded().t()).abs() + LEAST_FLOAT32


def spread_out(k: int, dtype: torch.dtype) -> torch.Tensor:
    power = {torch.float16: 7.0}.get(dtype, 30.0)
    return (torch.randn(1, k) * 2.0 ** ((2 * torch.rand(1, k) - 1) * power)).to(dtype)


@pytest.fixture(params=["avx512_vnni", "amx_emulated", "amx"])
def with_digits(request: pytest.FixtureRequest, library: KernelLibrary) -> str:
    """An instruction set that multiplies digits."""
    name: str = request.param
    if name not in library.instruction_sets:
        pytest.skip(f"needs {name}")
    return name


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("zero_point", [False, True])
def test_every_shape(isa: str, dtype: torch.dtype, zero_point: bool) -> None:
    del isa
    for k, groups in SHAPES:
        case = weight_only((1, k), 71, groups, dtype=dtype, zero_point=zero_point)

        case.check(case.run())


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("zero_point", [False, True])
def test_values_of_many_magnitudes(isa: str, dtype: torch.dtype, zero_point: bool) -> None:
    """With rests, or as floats."""
    del isa
    for k, groups in SHORT:
        case = weight_only((1, k), 71, groups, dtype=dtype, zero_point=zero_point, bias=False)
        for x in (spread_out(k, dtype), (torch.randn(1, k) * torch.rand(1, k) ** 3).to(dtype)):
            drawn = replace(case, x=x)

            drawn.check(drawn.run())


@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_bound_holds_for_each_output(
    with_digits: str, dtype: torch.dtype, zero_point: bool
) -> None:
    for (k, groups), factor in itertools.product(SHAPES, (1.0, 2.0**-4, 2.0**-13)):
        case = weight_only((1, k), 71, groups, dtype=dtype, zero_point=zero_point, bias=False)
        case.x[:, 1::17] *= factor
        case = replace(case, scale=case.scale + 1 if dtype is torch.float32 else case.scale)
        with instruction_set(with_digits):
            y = case.run()

        exact = case.x.double() @ case.unrounded().t()
        if k // groups >= 16:
            assert ((y.double() - exact).abs() <= bound(case)).all()


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("outliers", [1, 20, 100])
def test_outliers_whose_weights_are_zero(isa: str, dtype: torch.dtype, outliers: int) -> None:
    """They do not take bits from the others of their group, nor of the row."""
    del isa
    factors = (30.0, 1000.0) if dtype is torch.float16 else (30.0, 1000.0, 1e6, 1e12)
    for factor, zero_point in itertools.product(factors, [False, True]):
        case = weight_only((1, 1056), 71, 11, dtype=dtype, zero_point=zero_point, bias=False)
        case.x[:, :outliers] *= factor
        zero = case.spread(case.zero_point)[:, :outliers] if case.zero_point is not None else 8
        case.codes[:, :outliers] = zero

        case.check(case.run())


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("zero_point", [False, True])
def test_every_value_alone(isa: str, dtype: torch.dtype, zero_point: bool) -> None:
    """Each output reads one input: values are right to the rounding of a product, not of the row."""
    del isa
    for x in (torch.randn(1, 256).to(dtype), spread_out(256, dtype)):
        for groups in (1, 8):
            case = weight_only(
                (1, 256), 256, groups, dtype=dtype, zero_point=zero_point, bias=False
            )
            zero = case.codes.int() - case.steps(torch.int32)
            far = torch.where(zero > 7, 0, 15)
            codes = torch.where(torch.eye(256).bool(), far, zero)
            case = replace(case, x=x, codes=codes.to(torch.uint8), scale=torch.ones(256, groups))

            y = case.run(epilogue="cast(float32)", out_dtype=torch.float32)

            expected = x.double() * case.steps(torch.float64).diag()
            allowed = PRODUCT_EPSILONS * EPS + ROUNDING[dtype]
            finite = expected.abs() < torch.finfo(dtype).max
            assert ((y - expected).abs() <= allowed * expected.abs())[finite].all()


@pytest.mark.parametrize("dtype", REAL)
def test_bits_that_digits_barely_hold(isa: str, dtype: torch.dtype) -> None:
    """Significands of ones, powers of two, zeros, and values at both ends of the type."""
    del isa
    info = torch.finfo(dtype)
    ones = 2 - info.eps
    tiny = info.tiny * 2.0**20 if dtype is torch.bfloat16 else info.smallest_normal / 4
    for values in (
        [ones], [-ones], [ones, -ones, 1.0], [1.0, -1.0], [0.0], [-0.0], [-0.0, 0.0], [tiny],
        [tiny, -ones], [ones * 2.0**8, 2.0**-14], [0.0, ones * 2.0**13, 1.0],
    ):  # fmt: skip
        row = torch.tensor(values, dtype=torch.float64).repeat(64)[:64]
        for groups, zero_point in itertools.product((1, 2), (False, True)):
            case = weight_only((1, 64), 71, groups, dtype=dtype, zero_point=zero_point, bias=False)
            case = replace(case, x=row.to(dtype)[None], scale=torch.full((71, groups), 2.0**-14))

            case.check(case.run())


@pytest.mark.parametrize("power", [-149, -130, -126, -100, -95, 90, 105])
@pytest.mark.parametrize("zero_point", [False, True])
def test_ends_of_float32(isa: str, power: int, zero_point: bool) -> None:
    """Subnormal values keep their bits, and large ones do not overflow before the result."""
    del isa
    case = weight_only((1, 128), 71, 4, zero_point=zero_point, bias=False)
    x = torch.randint(1, 1000, (1, 128)).double() * 2.0**power
    case = replace(case, x=x.float(), scale=torch.ones(71, 4))

    y = case.run()

    exact = case.x.double() @ case.unrounded().t()
    assert ((y.double() - exact).abs() <= bound(case)).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", REAL)
def test_a_row_that_is_not_finite(isa: str, dtype: torch.dtype, value: float) -> None:
    del isa
    case = weight_only((1, 128), 71, 4, dtype=dtype, bias=False)
    case.x[0, 70] = value
    case.codes[:, 70] = 9

    y = case.run()

    assert torch.equal(y, torch.full((1, 71), value, dtype=dtype)) or y.isnan().all()
    assert y.isnan().all() == (value != value)  # noqa: PLR0124 - only nan


@pytest.mark.parametrize("zero_point", [False, True])
def test_the_largest_sums(with_digits: str, zero_point: bool) -> None:
    """Digits and codes at their ends, in segments of 256: the most that int32 has to hold."""
    for value, code in itertools.product((0x7F7F7F7F, 0x7F7F7F, -0x808080), (0, 15)):
        case = weight_only((1, 4096), 2, 2, zero_point=zero_point, bias=False)
        zero = None if case.zero_point is None else torch.full_like(case.zero_point, 15 - code)
        case = replace(
            case, x=torch.full((1, 4096), float(value)), codes=torch.full_like(case.codes, code),
            scale=torch.ones(2, 2), zero_point=zero,
        )  # fmt: skip
        with instruction_set(with_digits):
            y = case.run()

        exact = case.x.double() @ case.unrounded().t()
        assert ((y.double() - exact).abs() <= bound(case)).all()


@pytest.mark.parametrize("zero_point", [False, True])
def test_sums_of_whole_numbers_are_exact(with_digits: str, zero_point: bool) -> None:
    """No sum needs more than 24 bits."""
    case = weight_only((1, 1056), 71, 11, zero_point=zero_point, bias=False)
    x = torch.randint(-500, 500, (1, 1056)).float()
    case = replace(case, x=x, scale=torch.ones(71, 11))
    with instruction_set(with_digits):
        y = case.run()

    assert torch.equal(y.double(), x.double() @ case.unrounded().t())


def test_digits_are_used(with_digits: str) -> None:
    """They cancel to zero exactly where floats in another order leave a part."""
    x = torch.randn(1, 128).repeat(1, 2)
    case = weight_only((1, 256), 71, bias=False)
    codes = torch.randint(1, 16, (71, 128))
    case = replace(case, x=x, codes=torch.cat([codes, 16 - codes], 1).to(torch.uint8))
    results = {}
    for name in (with_digits, "avx512"):
        with instruction_set(name):
            results[name] = case.run()

    assert torch.equal(results[with_digits], torch.zeros(1, 71))
    assert not torch.equal(results["avx512"], torch.zeros(1, 71))


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("zero_point", [False, True])
def test_threads_do_not_change_a_bit(isa: str, dtype: torch.dtype, zero_point: bool) -> None:
    del isa
    case = weight_only((1, 1056), 331, 11, dtype=dtype, zero_point=zero_point)
    case.x[:, ::40] *= 500

    def run(threads: int) -> torch.Tensor:
        with limited_threads(threads):
            return case.run()

    one, *others = map(run, (1, 2, 7))

    assert all(torch.equal(one, y) for y in others)


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("zero_point", [False, True])
def test_guard_pages(isa: str, dtype: torch.dtype, zero_point: bool) -> None:
    """Rests read single words, also the last one."""
    del isa
    for k, groups in SHAPES:
        case = weight_only((1, k), 71, groups, dtype=dtype, zero_point=zero_point)
        case.x[:, -1] *= 300
        case.x[:, ::30] *= 0.002
        args, options = case.arguments()

        assert_same_with_guards(linear_w4a16, args, options)
