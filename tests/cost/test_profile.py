"""A profile is a checked value."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import replace
from typing import Any

import pytest

from qfuse.cost import CostProfile, ProductKind, ProductRates, RowRate
from qfuse.ir.errors import OptionsError

PINNED = CostProfile.pinned()
NUMBERS = [
    field.name
    for field in dataclasses.fields(CostProfile)
    if field.name
    not in {"machine", "threads", "quiet", "measured_seconds", "products", "python_call_seconds"}
]


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", NUMBERS)
def test_speeds_and_prices_are_positive(name: str, value: float) -> None:
    given = {field.name: getattr(PINNED, field.name) for field in dataclasses.fields(CostProfile)}
    with pytest.raises(OptionsError, match=f"{name} of a cost profile must be positive"):
        CostProfile(**(given | {name: value}))


def test_json_round_trip() -> None:
    odd = replace(PINNED, memory_bandwidth=1 / 3, quiet=False, measured_seconds=1.25)

    assert CostProfile.from_json(PINNED.to_json()) == PINNED
    assert CostProfile.from_json(odd.to_json()) == odd


def test_whole_numbers_may_stand_for_fractions() -> None:
    assert CostProfile.from_dict({**PINNED.to_dict(), "f32_flops": 7}).f32_flops == 7


def spoilt(**changes: Any) -> str:
    """The JSON of a profile with some fields replaced or, with "remove", left out."""
    data = {**PINNED.to_dict(), **changes}
    return json.dumps({name: value for name, value in data.items() if value != "remove"})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        spoilt(threads="remove"),
        spoilt(unknown=1.0),
        spoilt(threads=2.0),
        spoilt(threads=True),
        spoilt(quiet=1),
        spoilt(machine=None),
        spoilt(f32_flops="fast"),
        spoilt(f32_flops=True),
        spoilt(f32_flops=0),
        spoilt(f32_flops=math.nan),
        spoilt(products=[]),
        spoilt(products={"f64": [[1, 1e9, 0.0]]}),
        spoilt(products={"f32": []}),
        spoilt(products={"f32": [1, 1e9, 0.0]}),
        spoilt(products={"f32": [[1, 1e9]]}),
        spoilt(products={"f32": [[1, 0.0, 0.0]]}),
        spoilt(products={"f32": [[0, 1e9, 0.0]]}),
        spoilt(products={"f32": [[1, 1e9, -1e-9]]}),
        spoilt(products={"f32": [[1, 1e9, math.nan]]}),
        spoilt(products={"f32": [[4, 1e9, 0.0], [1, 1e9, 0.0]]}),
        spoilt(python_call_seconds=-1e-6),
        spoilt(python_call_seconds=math.inf),
    ],
)
def test_what_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(OptionsError, match="cost profile"):
        CostProfile.from_json(text)


def test_the_best_of_two_noisy_profiles() -> None:
    one = replace(PINNED, quiet=False, f32_flops=1.0, call_seconds=5.0, measured_seconds=1.0)
    two = replace(PINNED, quiet=False, int8_ops=2.0, library_call_seconds=7.0)

    best = one.best_of(two)

    assert best == replace(PINNED, quiet=False, measured_seconds=1.0)
    assert two.best_of(one) == replace(PINNED, quiet=False)


def test_profiles_of_two_machines_do_not_combine() -> None:
    for other in (replace(PINNED, machine="other"), replace(PINNED, threads=64)):
        with pytest.raises(OptionsError, match="do not combine"):
            PINNED.best_of(other)


def test_a_profile_can_be_shown() -> None:
    assert PINNED.describe() == [
        ("threads", "2"),
        ("memory", "25 GB/s"),
        ("cache", "130 GB/s up to 17 MB"),
        ("f32", "182 GOP/s, one row 12 GOP/s"),
        ("bf16", "425 GOP/s, one row 33 GOP/s"),
        ("int8", "860 GOP/s, one row 180 GOP/s"),
        ("operator call", "1.0 us"),
        ("oneDNN call", "20 us"),
        ("measured", "no, fixed"),
    ]
    measured = replace(PINNED, measured_seconds=1.23)
    assert measured.describe()[-1] == ("measured", "in 1.2 s on a quiet machine")
    noisy = replace(measured, quiet=False)
    assert noisy.describe()[-1] == ("measured", "in 1.2 s under background load")


# With 100 operations a row, 1 s with one row and 2 s with four; each column takes more.
RATES = ProductRates(ProductKind.F32_INT8, (RowRate(1, 100.0, 0.25), RowRate(4, 200.0, 0.5)))


@pytest.mark.parametrize(
    ("rows", "seconds"), [(0.5, 1.0), (1, 1.0), (2, 4 / 3), (4, 2.0), (8, 4.0), (40, 20.0)]
)
def test_times_between_the_measured_rows_are_interpolated(rows: float, seconds: float) -> None:
    assert RATES.seconds(100.0, rows) == pytest.approx(seconds)


@pytest.mark.parametrize(("rows", "seconds"), [(1, 3.5), (4, 7.0), (8, 14.0)])
def test_columns_take_time_beside_their_sums(rows: float, seconds: float) -> None:
    assert RATES.seconds(100.0, rows, 10) == pytest.approx(seconds)


def test_fewer_rows_never_take_longer() -> None:
    rates = (RowRate(1, 100.0), RowRate(4, 800.0), RowRate(32, 800.0))
    seconds = [ProductRates(ProductKind.INT8, rates).seconds(100.0, rows) for rows in (1, 2, 4, 32)]

    assert seconds == pytest.approx([0.5, 0.5, 0.5, 4.0])


def test_threads_share_the_work_up_to_the_bandwidth_of_memory() -> None:
    def rates(memory: float) -> tuple[RowRate, ...]:
        return RATES.times(3, memory).rates

    assert rates(1e9) == (RowRate(1, 300.0, 0.25 / 3), RowRate(4, 600.0, 0.5 / 3))
    # Two operations for each byte in each row.
    assert [one.rate for one in rates(70.0)] == [140.0, 560.0]
    # One thread was seen to be faster.
    assert [one.rate for one in rates(1.0)] == [100.0, 200.0]
    half = ProductRates(ProductKind.F32_INT4, (RowRate(1, 100.0),)).times(3, 70.0)
    assert half.rates == (RowRate(1, 280.0),)


def test_the_best_rates_of_two_profiles() -> None:
    one = replace(PINNED, products=(RATES,), python_call_seconds=3e-6)
    # A slow column is what noise takes from a sum.
    noisy, fast, more = RowRate(1, 101.0, 0.9), RowRate(4, 300.0, 0.25), RowRate(32, 400.0)
    better = ProductRates(RATES.product, (noisy, fast, more))
    other = ProductRates(ProductKind.INT8, (RowRate(1, 7.0),))
    two = replace(PINNED, products=(other, better), python_call_seconds=2e-6)

    best = one.best_of(two)

    assert best.products == (ProductRates(RATES.product, (RATES.rates[0], fast, more)), other)
    assert best.python_call_seconds == 2e-6
    assert replace(best, products=best.products[::-1]) == best
    assert CostProfile.from_json(best.to_json()) == best
    assert best.rates_of(ProductKind.INT8) == other
    assert best.rates_of(ProductKind.BF16) is best.rates_of(None) is None
    assert any("by rows, 1: 100" in text for _, text in best.describe())


def test_a_product_has_its_rates_once() -> None:
    with pytest.raises(OptionsError, match="twice"):
        replace(PINNED, products=(RATES, RATES))


def test_rates_are_rounded_as_the_others_are() -> None:
    assert RATES.rounded(lambda value: value + 1).rates[0] == RowRate(1, 101.0, 1.25)
    assert ProductRates(ProductKind.F32, (RowRate(1, 1.0),)).rounded(float).rates == (
        RowRate(1, 1.0),
    )
