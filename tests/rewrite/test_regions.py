from __future__ import annotations

import pytest
import torch

from qfuse.rewrite.regions import Region
from qfuse.testing.build import GraphBuilder

aten = torch.ops.aten
DENSE = {"rows": [0, 1, 2], "turned": [0, 2, 1], "reversed": [2, 1, 0]}


@pytest.mark.parametrize("order", DENSE.values(), ids=list(DENSE))
@pytest.mark.parametrize("sizes", [(2, 3, 4), ("n", 3, "l"), (1, 3, 4)])
def test_a_region_can_be_left_by_dense_values(
    order: list[int], sizes: tuple[int | str, ...]
) -> None:
    b = GraphBuilder()
    turned = b.call(aten.permute.default, b.arg("x", torch.float32, *sizes), order)

    assert Region({turned: [turned]}).can_be_left


def test_a_region_cannot_be_left_by_values_with_gaps_or_by_several() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 4, 6)
    pair = b.call(aten.split.Tensor, x, 3, 1)

    assert not Region({b.item(pair, 0): [x]}).can_be_left
    assert not Region({pair: [x]}).can_be_left
    empty = b.arg("empty", torch.float32, 2, 0, 4)
    assert not Region({empty: [x]}).can_be_left, "its strides say nothing about its layout"
    assert Region({pair: []}).can_be_left, "nobody needs its strides"
