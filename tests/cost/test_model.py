"""The model: numbers by hand, laws by hypothesis, sentences word by word."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qfuse.cost import (
    Bits,
    Bound,
    ComputeKind,
    CostModel,
    CostProfile,
    Estimate,
    ProductKind,
    ProductRates,
    RowRate,
    SizeRange,
    Work,
    WorkRange,
    at_points,
    linear_work,
    pointwise_work,
)

# Speeds that make mental arithmetic possible.
PLAIN = replace(
    CostProfile.pinned(),
    memory_bandwidth=10.0,
    cache_bandwidth=100.0,
    cache_bytes=50,
    f32_flops=1_000.0,
    f32_flops_one_row=100.0,
    bf16_flops=2_000.0,
    bf16_flops_one_row=2_000.0,
    int8_ops=4_000.0,
    int8_ops_one_row=8_000.0,
    call_seconds=0.25,
    library_call_seconds=2.0,
)
MODEL = CostModel(PLAIN)
PINNED = CostModel(CostProfile.pinned())
KINDS = st.sampled_from([ComputeKind.F32, ComputeKind.BF16, ComputeKind.INT8])
SIZES = st.integers(0, 5_000)
WIDTHS = st.sampled_from([4, 8, 16, 32])


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        (ComputeKind.F32, 8.0),
        (ComputeKind.NONE, 8.0),
        (ComputeKind.BF16, 4.0),
        (ComputeKind.INT8, 2.0),
    ],
)
def test_computing(kind: ComputeKind, seconds: float) -> None:
    assert MODEL.estimate(Work(flops=8_000, kind=kind)).compute == pytest.approx(seconds)


def test_one_row_is_paid_at_its_own_rate() -> None:
    one = Work(flops=1_000, kind=ComputeKind.F32, one_row_flops=1_000)
    five = replace(one, flops=5_000)

    assert MODEL.estimate(one).compute == pytest.approx(10.0)
    assert MODEL.estimate(five).compute == pytest.approx(10.0 + 4.0)


def test_measured_rates_of_a_product_replace_those_of_its_arithmetic() -> None:
    rates = ProductRates(ProductKind.F32_INT8, (RowRate(1, 50.0), RowRate(10, 400.0)))
    model = CostModel(replace(PLAIN, products=(rates,)))

    def computing(rows: int, weight_bits: int) -> float:
        work = linear_work(rows, 10, 20, Bits(32, weight_bits, 32), ComputeKind.F32)
        return model.estimate(work.hint).compute

    # 400 operations a row: 8 s with one row, 10 s with ten.
    assert [computing(rows, 8) for rows in (0, 1, 10, 20)] == pytest.approx([0, 8, 10, 20])
    # Others run at 1000 a second, and at 100 in the first row.
    assert [computing(rows, 16) for rows in (1, 11)] == pytest.approx([4, 8])
    assert model.estimate(Work(flops=8_000, kind=ComputeKind.F32)).compute == 8


def test_measured_rates_are_those_of_weights_from_memory() -> None:
    rates = ProductRates(ProductKind.INT8, (RowRate(1, 50.0, 0.5),))
    model = CostModel(replace(PLAIN, products=(rates,)))
    work = Work(
        400, ComputeKind.INT8, 300, (10,), (20,), 400, 0, product=ProductKind.INT8, columns=4
    )

    # 8 s for the sums and 2 s for the columns. The weight alone would take longer by itself.
    assert model.estimate(work) == Estimate(compute=10.0, memory=10.0, calls=0.0)
    assert model.explain(work).startswith("memory bound: 300 B at 31 B/s + 30 B in cache")
    assert model.estimate(replace(work, product=None)).memory > 10.0
    # Much else is not in the measured time.
    assert model.estimate(replace(work, reads=(10**6,))).memory > 1000.0
    assert model.estimate(replace(work, flops=0, one_row_flops=0)).memory > 10.0


def test_one_row_is_never_faster_than_many() -> None:
    one = Work(flops=4_000, kind=ComputeKind.INT8, one_row_flops=4_000)

    assert MODEL.estimate(one).compute == pytest.approx(1.0)


def test_moving() -> None:
    # Weights always come from memory; tensors of up to 50 bytes stay in the cache.
    work = Work(weight_bytes=20, reads=(50, 60), writes=(10, 51))

    assert MODEL.estimate(work).memory == pytest.approx((20 + 60 + 51) / 10 + (50 + 10) / 100)


def test_calls() -> None:
    work = Work(kernel_calls=5, library_calls=2)

    assert MODEL.estimate(work).calls == pytest.approx(3 * 0.25 + 2 * 2.0)


def test_computing_and_moving_overlap_and_calls_do_not() -> None:
    work = Work(flops=3_000, kind=ComputeKind.F32, weight_bytes=10)

    assert MODEL.seconds(work) == pytest.approx(3.0 + 0.25)
    assert MODEL.seconds(replace(work, weight_bytes=70)) == pytest.approx(7.0 + 0.25)


@pytest.mark.parametrize(
    ("work", "bound"),
    [
        (Work(flops=1_000, kind=ComputeKind.F32), Bound.COMPUTE),
        (Work(flops=1_000, kind=ComputeKind.F32, weight_bytes=11), Bound.MEMORY),
        (Work(weight_bytes=1), Bound.CALLS),
        (Work(weight_bytes=3), Bound.MEMORY),
        (Work(), Bound.CALLS),
    ],
)
def test_bounds(work: Work, bound: Bound) -> None:
    assert MODEL.estimate(work).bound is bound


def test_a_plan_is_a_sum() -> None:
    parts: list[Work | WorkRange] = [
        Work(weight_bytes=10),
        pointwise_work(SizeRange(1, 10, 100), [8], []),
    ]

    assert MODEL.seconds([]) == 0
    assert MODEL.seconds(parts) == pytest.approx(1.0 + 0.1 + 2 * 0.25)
    assert MODEL.seconds_at_points(iter(parts)).values == pytest.approx(
        (1.0 + 0.01 + 0.5, 1.0 + 0.1 + 0.5, 1.0 + 10.0 + 0.5)
    )


def line(slope: float, offset: float) -> WorkRange:
    """Work that takes ``slope * size + offset`` seconds, at sizes 1, 10 and 100."""

    def build(size: int) -> Work:
        return Work(weight_bytes=10 * (slope * size + offset), kernel_calls=0)

    return at_points(build, SizeRange(1, 10, 100))


@pytest.mark.parametrize(
    ("after", "wins", "gain"),
    [
        (line(1, 5), True, 0.0),
        (line(1, 4), True, 1.0),
        (line(0.5, 5.5), True, 4.5),
        (line(0.5, 5.6), False, 4.4),  # loses at the least size only
        (line(1.1, 1), False, 3.0),  # loses at the greatest size only
        (line(2, -1), False, -4.0),
    ],
)
def test_fire_only_if_no_size_loses(after: WorkRange, wins: bool, gain: float) -> None:
    before = line(1, 5)

    assert MODEL.compare(before, after).loses_nowhere is wins
    assert MODEL.compare(before, after).gain == pytest.approx(gain)


def test_a_tie_is_no_loss_whatever_the_order_of_summing() -> None:
    parts = [Work(weight_bytes=0.1), Work(weight_bytes=0.2), Work(weight_bytes=0.3)]

    assert MODEL.compare(parts, parts[::-1]).loses_nowhere
    assert MODEL.compare(parts[::-1], parts).loses_nowhere


def test_no_upper_bound_is_looked_at_far_out() -> None:
    rows = SizeRange(1, 8, None)
    before = at_points(lambda n: Work(weight_bytes=n), rows)
    # Better up to a thousand rows, worse beyond.
    after = at_points(lambda n: Work(weight_bytes=1.001 * n - 1), rows)

    assert MODEL.compare(before, after).gain > 0
    assert not MODEL.compare(before, after).loses_nowhere


def test_merging_siblings_that_read_one_input_wins() -> None:
    rows = SizeRange(1, 128, 4096)
    bits = Bits(8, 8, 16)
    apart = [linear_work(rows, 1024, n, bits, ComputeKind.INT8) for n in (1024, 256, 256)]
    merged = linear_work(rows, 1024, 1536, bits, ComputeKind.INT8)

    assert PINNED.compare(apart, merged).loses_nowhere
    assert not PINNED.compare(merged, apart).loses_nowhere


@given(KINDS, SIZES, SIZES, SIZES, WIDTHS, st.integers(1, 500))
def test_more_work_never_takes_less_time(
    kind: ComputeKind, m: int, k: int, n: int, width: int, more: int
) -> None:
    bits = Bits(width, width, width)
    base = PINNED.seconds(linear_work(m, k, n, bits, kind))

    for larger in ((m + more, k, n), (m, k + more, n), (m, k, n + more)):
        assert PINNED.seconds(linear_work(*larger, bits, kind)) >= base
    for wider in (Bits(2 * width, width, width), Bits(width, 2 * width, width)):
        assert PINNED.seconds(linear_work(m, k, n, wider, kind)) >= base
    assert base > 0


@given(KINDS, SIZES, SIZES, SIZES)
def test_better_machines_are_not_slower(kind: ComputeKind, m: int, k: int, n: int) -> None:
    work = linear_work(m, k, n, Bits(8, 8, 32), kind).hint.with_calls(2, 1)
    profile = PINNED.profile
    base = PINNED.seconds(work)

    for name in ("memory_bandwidth", "cache_bandwidth", "f32_flops", "bf16_flops", "int8_ops"):
        faster = replace(profile, **{name: 2 * getattr(profile, name)})
        assert CostModel(faster).seconds(work) <= base
    for name in ("call_seconds", "library_call_seconds"):
        dearer = replace(profile, **{name: 2 * getattr(profile, name)})
        assert CostModel(dearer).seconds(work) > base


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (
            Work(weight_bytes=4.2e6),
            "memory bound: 4.2 MB at 25 GB/s + 1 call = 0.17 ms",
        ),
        (
            Work(weight_bytes=4.2e6, reads=(1e6, 1e6), writes=(100e6,), kernel_calls=2),
            "memory bound: 104 MB at 25 GB/s + 2.0 MB in cache at 130 GB/s + 2 calls = 4.19 ms",
        ),
        (
            Work(reads=(1e6,)),
            "memory bound: 1.0 MB in cache at 130 GB/s + 1 call = 8.7 us",
        ),
        (
            Work(flops=17.2e9, kind=ComputeKind.INT8),
            "compute bound: 17 GOP in int8 at 860 GOP/s + 1 call = 20 ms",
        ),
        (
            Work(weight_bytes=1e3, kernel_calls=3, library_calls=3),
            "call bound: 3 calls = 60 us",
        ),
        (Work(), "call bound: 1 call = 1.0 us"),
        (Work(kernel_calls=0), "memory bound: 0 B at 25 GB/s + 0 calls = 0 us"),
    ],
)
def test_explanations(work: Work, text: str) -> None:
    assert PINNED.explain(work) == text


def test_a_range_is_explained_at_its_hint() -> None:
    work = linear_work(SizeRange(1, 512, None), 4096, 4096, Bits(8, 8, 16), ComputeKind.INT8)

    assert PINNED.explain(work) == PINNED.explain(work.hint)


def test_comparisons_speak() -> None:
    exact = MODEL.compare(Work(weight_bytes=10), Work(weight_bytes=5))
    sized = PINNED.compare(
        pointwise_work(SizeRange(100, 10**6, 10**8), [32, 32], [32]),
        pointwise_work(SizeRange(100, 10**6, 10**8), [32], []),
    )

    assert str(exact) == "1250 ms -> 750 ms (1.67x)"
    assert str(sized) == (
        "93 us -> 32 us (2.94x; 1.01x at the smallest size, 3.00x at the largest)"
    )
