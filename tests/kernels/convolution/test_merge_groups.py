"""Merged groups compute the same, bit for bit."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from tests.support.cases.convolution_kernel import Convolution, convolution, window

from qfuse.kernels.merge_groups import groups_to_merge, merge_groups, merge_transposed_groups

pytestmark = pytest.mark.numeric

WINDOWS = {
    "1x1": window(1, 1),
    "3x3": window(3, 3, padding=1, stride=2),
    "transposed": window(3, 2, stride=2, output_padding=(1, 0), transposed=True),
}


def merged(case: Convolution, by: int) -> Convolution:
    w = case.window
    merge = merge_transposed_groups if w.transposed else merge_groups
    weight = merge(case.weight, case.w_zero_point, w.groups, by)
    return replace(case, weight=weight, window=replace(w, groups=w.groups // by))


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize(
    ("groups", "by", "channels", "features"),
    [(2, 2, 1, 1), (6, 3, 2, 4), (32, 4, 4, 4), (12, 12, 1, 1), (8, 2, 3, 5), (3, 1, 4, 4)],
)
def test_values(isa: str, name: str, groups: int, by: int, channels: int, features: int) -> None:
    del isa
    w = replace(WINDOWS[name], groups=groups)
    for weight_zero_point in (False, True):
        case = convolution(
            (2, channels * groups, 7, 6), features * groups, w, weight_zero_point=weight_zero_point
        )
        zero = case.w_zero_point
        if zero is not None and w.transposed:
            case = replace(case, w_zero_point=zero[:features].repeat(groups))
        y = merged(case, by).run()

        assert torch.equal(y, case.expected())


def test_how_many() -> None:
    assert groups_to_merge(1, 64, 576) == 1
    assert groups_to_merge(32, 4, 36) == 4
    assert groups_to_merge(32, 8, 72) == 2
    assert groups_to_merge(32, 16, 144) == 1
    assert groups_to_merge(96, 1, 9) == 16
    assert groups_to_merge(7, 1, 9) == 7
    assert groups_to_merge(34, 1, 9) == 2
    assert groups_to_merge(4, 1, 1 << 14) == 2
    assert groups_to_merge(4, 0, 0) == 4


def test_weights_between_groups_are_zero() -> None:
    weight = torch.randint(-128, 128, (6, 2, 3), dtype=torch.int8)
    zero = torch.tensor([1, -2, 3, -4, 5, -6])

    wide = merge_groups(weight, zero, 3, 3)
    across = merge_transposed_groups(weight, zero, 3, 3)

    for row, slot in itertools.product(range(6), range(3)):
        own = slot == row // 2
        part = wide[row, 2 * slot : 2 * slot + 2]
        assert torch.equal(part, weight[row]) if own else bool((part == zero[row]).all())
        part = across[row, 2 * slot : 2 * slot + 2]
        expected = weight[row] if own else zero[:2].to(torch.int8).reshape(2, 1).expand(2, 3)
        assert torch.equal(part, expected)
