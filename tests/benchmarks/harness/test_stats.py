"""The figures of the tables, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from qfuse_bench.harness.stats import (
    geometric_mean,
    mean_ratio,
    median,
    quantile,
    ratio_of_medians,
    sqnr,
)


def test_median_of_odd_and_even_counts() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.5


def test_quantile_interpolates() -> None:
    values = [float(i) for i in range(11)]

    assert quantile(values, 0.1) == 1.0
    assert quantile([0.0, 1.0], 0.1) == pytest.approx(0.1)


def test_nothing_has_no_quantile() -> None:
    with pytest.raises(ValueError, match="no quantile"):
        median([])


def test_ratio_of_a_constant_factor_is_exact() -> None:
    theirs = [1.0, 5.0, 2.0, 9.0, 3.0]
    ratio = ratio_of_medians([x / 2 for x in theirs], theirs)

    assert (ratio.value, ratio.low, ratio.high) == (0.5, 0.5, 0.5)


def test_ratio_is_of_medians() -> None:
    assert ratio_of_medians([1.0, 2.0, 30.0], [4.0, 4.0, 4.0]).value == 0.5


def test_interval_covers_the_ratio_and_shrinks_with_rounds() -> None:
    torch.manual_seed(0)
    draw = torch.rand(2, 400).add_(1).tolist()
    few = ratio_of_medians(draw[0][:15], draw[1][:15])
    many = ratio_of_medians(*draw)

    assert few.low < few.value < few.high
    assert many.low < 1.0 < many.high
    assert many.high - many.low < (few.high - few.low) / 2


def test_rounds_are_drawn_in_pairs() -> None:
    # Round by round the machine is up to ten times slower, for both alike.
    slow = [1.0 + i % 10 for i in range(30)]
    paired = ratio_of_medians([0.9 * x for x in slow], slow)
    unpaired = ratio_of_medians([0.9 * x for x in slow], slow[1:] + slow[:1])

    assert paired.high - paired.low == pytest.approx(0.0, abs=1e-12)
    assert unpaired.high - unpaired.low > 0.1


def test_series_of_different_rounds_do_not_pair() -> None:
    with pytest.raises(ValueError, match="do not pair"):
        ratio_of_medians([1.0], [1.0, 2.0])


def test_geometric_mean() -> None:
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert geometric_mean([1.0, 10.0, 100.0]) == pytest.approx(10.0)
    assert math.isnan(geometric_mean([]))


def test_mean_of_ratios() -> None:
    assert mean_ratio([]) is None

    exact = mean_ratio([([1.0, 2.0, 3.0], [2.0, 4.0, 6.0]), ([8.0, 8.0], [1.0, 1.0])])

    assert exact is not None
    assert exact.value == pytest.approx(2.0)
    assert [exact.low, exact.high] == pytest.approx([2.0, 2.0])


def test_a_mean_is_surer_than_its_parts() -> None:
    pairs = [tuple(torch.rand(2, 15).add_(1).tolist()) for _ in range(16)]
    one, all_of_them = mean_ratio(pairs[:1]), mean_ratio(pairs)

    assert one is not None
    assert all_of_them is not None
    assert one == ratio_of_medians(*pairs[0])
    assert all_of_them.low < all_of_them.value < all_of_them.high
    assert all_of_them.high - all_of_them.low < one.high - one.low


def test_sqnr_of_a_tenth_is_twenty_decibels() -> None:
    reference = [torch.ones(4), torch.full((2, 3), 2.0)]
    answer = [x * 1.1 for x in reference]

    assert sqnr(reference, answer) == pytest.approx(20.0, abs=1e-4)


def test_sqnr_of_an_exact_answer_is_infinite() -> None:
    x = [torch.arange(3.0)]

    assert sqnr(x, [x[0].clone()]) == math.inf


@pytest.mark.parametrize(
    "answer",
    [
        [torch.full((3,), math.nan)],
        [torch.full((3,), math.inf)],
        [torch.ones(3, 1)],
        [torch.ones(3), torch.ones(3)],
        [],
    ],
)
def test_sqnr_of_what_is_no_answer_is_minus_infinity(answer: list[torch.Tensor]) -> None:
    assert sqnr([torch.ones(3)], answer) == -math.inf


def test_sqnr_against_silence() -> None:
    assert sqnr([torch.zeros(3)], [torch.ones(3)]) == -math.inf
