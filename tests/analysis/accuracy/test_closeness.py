from __future__ import annotations

import json
import math

import pytest
import torch

from qfuse.analysis.accuracy.closeness import Closeness, ErrorSums, db_text


def close(*pairs: tuple[torch.Tensor, torch.Tensor]) -> Closeness:
    sums = ErrorSums()
    for reference, value in pairs:
        sums.add(reference, value)
    return sums.closeness()


def test_numbers_are_those_of_the_definitions() -> None:
    a = torch.tensor([3.0, 4.0])
    b = torch.tensor([3.0, 4.5])
    found = close((a, b))
    assert found.sqnr_db == pytest.approx(20.0)
    assert found.largest == pytest.approx(0.5)
    assert found.cosine == pytest.approx(27 / (5 * math.hypot(3, 4.5)))


def test_equal_values_are_exact_and_opposite_ones_are_not() -> None:
    a = torch.randn(8)
    assert close((a, a)).sqnr_db == math.inf
    assert close((a, a)).is_exact
    assert close((a, -a)).cosine == pytest.approx(-1)
    assert close((a, -a)).sqnr_db == pytest.approx(10 * math.log10(1 / 4))


def test_batches_count_as_one_tensor() -> None:
    a, b = torch.randn(10), torch.randn(10)
    parts = close((a[:3], b[:3]), (a[3:], b[3:]))
    whole = close((a, b))
    assert parts.sqnr_db == pytest.approx(whole.sqnr_db)
    assert parts.cosine == pytest.approx(whole.cosine)
    assert parts.largest == whole.largest


def test_values_that_are_not_finite() -> None:
    inf = torch.tensor([1.0, math.inf, -math.inf, math.nan])
    # Masks of attention are infinite on both sides.
    assert close((inf, inf)).is_exact
    bad = close((torch.ones(3), torch.tensor([1.0, math.nan, 1.0])))
    assert bad.sqnr_db == -math.inf
    assert bad.largest == math.inf
    assert db_text(bad.sqnr_db) == "not finite"


def test_a_reference_of_zeros_or_without_elements() -> None:
    assert close((torch.zeros(3), torch.ones(3))).sqnr_db == -math.inf
    assert close((torch.zeros(3), torch.zeros(3))).is_exact
    assert math.isnan(close((torch.zeros(3), torch.zeros(3))).cosine)
    assert close((torch.zeros(0), torch.zeros(0))).is_exact


def test_data_is_json() -> None:
    data = close((torch.zeros(3), torch.ones(3))).to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == {
        "sqnr_db": None,
        "cosine": None,
        "largest_error": 1.0,
    }


def test_bfloat16_and_layouts_do_not_matter() -> None:
    a = torch.randn(4, 6)
    found = close((a, a.t().contiguous().t().bfloat16()))
    assert 40 < found.sqnr_db < 70


def test_quantized_values_are_compared_without_their_zero_point() -> None:
    a = torch.randint(100, 156, (1000,)).to(torch.uint8)
    b = a + (torch.rand(1000) < 0.1)
    near = close((a, b.to(torch.uint8)))
    moved = close(((a - 100), (b - 100).to(torch.uint8)))
    assert near.sqnr_db == pytest.approx(moved.sqnr_db)
    assert near.largest == 1
