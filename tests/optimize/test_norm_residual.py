"""Which sums in front of a norm are residuals, that the fused norm adds itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.cases.norm import Spelling, Writer, fused
from torch.fx import Node

pytestmark = pytest.mark.numeric

aten = torch.ops.aten
F32, BF16 = torch.float32, torch.bfloat16


def summed(op: Any, *args: Any, **kwargs: Any) -> tuple[Writer, Node]:
    w = Writer("m", 3, 8)
    args = tuple(a(w) if callable(a) else a for a in args)
    return w, w.call(op, w.x, *args, **kwargs)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((lambda w: w.arg("r"),), {"alpha": 2}),
        ((lambda w: w.const(torch.randn(8)),), {}),
        ((lambda w: w.const(torch.randn(1, 3, 8)),), {}),
        ((1.5,), {}),
    ],
    ids=["scaled", "row", "broadcast", "number"],
)
def test_only_a_plain_sum_is_a_residual(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    w, total = summed(aten.add.Tensor, *args, **kwargs)
    norm = fused(w.done(w.static(w.spelled(Spelling(), total))), m=4)
    assert norm.residual is None
    assert norm.x.target is aten.add.Tensor


@pytest.mark.parametrize("dtypes", [(F32, BF16), (BF16, F32), (BF16, BF16)])
def test_residuals_of_other_types_promote(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    w = Writer("m", 8, dtype=dtypes[0])
    total = w.call(aten.add.Tensor, w.x, w.arg("r", dtypes[1]))
    y = w.spelled(Spelling(wide=F32), total)
    assert fused(w.done(w.static(y), total), m=4).residual is not None


def test_a_value_added_to_itself_is_a_residual() -> None:
    w, total = summed(aten.add.Tensor, lambda w: w.x)
    norm = fused(w.done(w.static(w.spelled(Spelling(), total)), total), m=4)
    assert norm.residual is norm.x


def test_a_weight_that_is_computed_from_the_sum_leaves_the_sum_where_it_is() -> None:
    w = Writer(3, 8)
    total = w.call(aten.add.Tensor, w.x, w.arg("r"))
    weight = w.call(aten.sigmoid.default, total)
    y = w.mul(w.spelled(Spelling(weight="none"), total), weight)
    norm = fused(w.done(w.static(y)))
    assert norm.residual is None
    assert norm.weight is not None
