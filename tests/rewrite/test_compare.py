from __future__ import annotations

import math

import pytest
import torch

from qfuse.ir.events import Exactness
from qfuse.rewrite.compare import compare, compare_rounded
from qfuse.rewrite.tolerance import SITE

EXACT, ROUNDING = Exactness.EXACT, Exactness.ROUNDING


def test_exact_is_bits_and_nan_is_nan() -> None:
    x = torch.randn(100)
    x[3] = float("nan")
    assert compare(x.clone(), x, None, EXACT, SITE).wrong is None
    off = x.clone()
    off[7] = torch.nextafter(off[7], torch.tensor(9.0))
    assert "differ in bits" in (compare(off, x, None, EXACT, SITE).wrong or "")


def test_another_order_of_summation_is_rounding() -> None:
    x, w = torch.randn(64, 512), torch.randn(32, 512)
    truth = x.double() @ w.double().T
    one = x @ w.T
    other = sum(x[:, i : i + 64] @ w[:, i : i + 64].T for i in range(0, 512, 64))
    assert isinstance(other, torch.Tensor)
    assert compare(other, one, truth, ROUNDING, SITE).wrong is None


@pytest.mark.parametrize("factor", [1 + 1e-4, 1 - 1e-4])
def test_a_scale_that_is_off_by_a_little_is_not(factor: float) -> None:
    x, w = torch.randn(64, 512), torch.randn(32, 512)
    truth = x.double() @ w.double().T
    assert compare((x @ w.T) * factor, x @ w.T, truth, ROUNDING, SITE).wrong is not None


def test_one_wrong_element_is_found() -> None:
    y = torch.randn(1000)
    off = y.clone()
    off[500] += 1e-3
    assert compare(off, y, y.double(), ROUNDING, SITE).wrong is not None


def test_an_infinity_that_was_not_there_is_found() -> None:
    y = torch.randn(10)
    off = y.clone()
    off[0] = float("inf")
    assert "infinite" in (compare(off, y, None, ROUNDING, SITE).wrong or "")


def test_codes_may_flip_rarely_and_by_one() -> None:
    q = torch.randint(-100, 100, (5000,), dtype=torch.int8)
    rare, many, far = q.clone(), q.clone(), q.clone()
    rare[:3] += 1
    many[:100] += 1
    far[0] += 2
    assert compare(rare, q, None, ROUNDING, SITE).wrong is None
    assert "differ by a step" in (compare(many, q, None, ROUNDING, SITE).wrong or "")
    assert "2 steps" in (compare(far, q, None, ROUNDING, SITE).wrong or "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_floats_behind_a_rounding_may_be_a_step_off_as_rarely(dtype: torch.dtype) -> None:
    step = torch.tensor([[0.02]])
    old = (torch.randint(-100, 100, (50, 100)) * step).to(dtype)
    rare, many, far, half = old.clone(), old.clone(), old.clone(), old.clone()
    rare[0, :3] += step[0]
    many[0] += step[0]
    far[0, 0] += 2 * step[0, 0]
    half[0, 0] += 0.4 * step[0, 0]

    def wrong(new: torch.Tensor) -> str:
        return compare_rounded(new, old, None, step, SITE).wrong or ""

    assert not wrong(old)
    assert not wrong(rare)
    assert "differ by a step" in wrong(many)
    assert "2 steps" in wrong(far)
    if dtype is torch.float32:
        assert "noise" in wrong(half)
    far[0, 0] = torch.inf
    assert "infinite" in wrong(far)
    assert "type changed" in wrong(old.double())


def test_a_change_of_type_is_always_wrong() -> None:
    y = torch.randn(4)
    for new in (y.double(), y.reshape(2, 2)):
        assert "type changed" in (compare(new, y, None, Exactness.LOSSY, SITE).wrong or "")


def test_exact_tells_the_sign_of_zero_but_not_one_nan_from_another() -> None:
    zero, nan = torch.tensor([0.0, 1.0]), torch.tensor([torch.nan, 1.0])
    assert compare(-zero, -zero, None, Exactness.EXACT, SITE).wrong is None
    assert compare(torch.tensor([-0.0, 1.0]), zero, None, Exactness.EXACT, SITE).wrong is not None
    assert compare(torch.tensor([-0.0, 1.0]), zero, None, Exactness.ROUNDING, SITE).wrong is None
    assert compare(-nan * -1, nan, None, Exactness.EXACT, SITE).wrong is None


@pytest.mark.parametrize("old", [torch.inf, -torch.inf, torch.nan, 1.0])
@pytest.mark.parametrize("new", [torch.inf, -torch.inf, torch.nan, 1.0])
def test_infinities_and_nan_must_be_what_they_were(old: float, new: float) -> None:
    pair = torch.tensor([old, 1.0]), torch.tensor([new, 1.0])
    verdict = compare(pair[1], pair[0], None, Exactness.ROUNDING, SITE)
    same = old == new or (math.isnan(old) and math.isnan(new))
    assert (verdict.wrong is None) is same
