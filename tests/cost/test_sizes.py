"""Sizes known at run time only, at their three points."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim, export

from qfuse.cost import AtPoints, SizeRange, at_points, size_range
from qfuse.cost.sizes import UNBOUNDED
from qfuse.ir.errors import OptionsError


@pytest.mark.parametrize("sizes", [(-1, 0, 1), (2, 1, 3), (1, 4, 3), (5, 5, 4)])
def test_a_range_in_disorder_is_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(OptionsError, match="0 <= low <= hint <= high"):
        SizeRange(*sizes)


def test_points() -> None:
    assert SizeRange(1, 16, 512).points == (1, 16, 512)
    assert SizeRange(0, 0, 0).points == (0, 0, 0)
    assert SizeRange(2, 16, None).points == (2, 16, UNBOUNDED)
    assert SizeRange(2, 2 * UNBOUNDED, None).points == (2, 2 * UNBOUNDED, 2 * UNBOUNDED)


def test_products() -> None:
    batch, length = SizeRange(1, 4, 8), SizeRange(2, 16, 128)

    assert batch * length == SizeRange(2, 64, 1024)
    assert batch * 3 == 3 * batch == SizeRange(3, 12, 24)
    assert batch * SizeRange(1, 2, None) == SizeRange(1, 8, None)
    assert SizeRange(1, 2, None) * batch == SizeRange(1, 8, None)


def test_functions_of_several_sizes_are_evaluated_point_by_point() -> None:
    seen = at_points(lambda *sizes: sizes, SizeRange(1, 2, 3), 7, SizeRange(4, 5, None))

    assert seen == AtPoints((1, 7, 4), (2, 7, 5), (3, 7, UNBOUNDED))


class Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x]) * 2


def traced_size(rows: int, dim: object) -> int | torch.SymInt:
    """The first size of an output twice as long as a traced input of that many rows."""
    program = export(Doubled(), (torch.ones(rows, 3),), dynamic_shapes=({0: dim},))
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    size: int | torch.SymInt = nodes[0].meta["val"].shape[0]
    return size


def test_an_exact_size() -> None:
    assert size_range(7) == SizeRange(7, 7, 7)
    assert size_range(traced_size(4, Dim.STATIC)) == SizeRange(8, 8, 8)


def test_a_traced_size_with_bounds() -> None:
    size = traced_size(4, Dim("rows", min=3, max=512))

    assert size_range(size) == SizeRange(6, 8, 1024)


def test_a_traced_size_without_an_upper_bound() -> None:
    traced = size_range(traced_size(4, Dim.DYNAMIC))

    assert (traced.hint, traced.high) == (8, None)
    assert 0 <= traced.low <= 4


def test_a_size_that_depends_on_data() -> None:
    class Nonzero(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nonzero(x)

    program = export(Nonzero(), (torch.ones(1000),))
    node = next(node for node in program.graph.nodes if node.op == "call_function")
    size = node.meta["val"].shape[0]

    traced = size_range(size)
    assert not size.node.has_hint()
    assert traced.low == 0
    assert traced.low < traced.hint
    assert traced.high is None or traced.hint <= traced.high
