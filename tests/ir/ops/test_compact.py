from __future__ import annotations

import pytest
import torch

from qfuse.ir.ops.compact import CompactParams, compact_params
from qfuse.ir.ops.views import QuantParams
from qfuse.ir.quant.spec import QuantSpec
from qfuse.ir.refusal import Refusal
from qfuse.testing.build import GraphBuilder

SHAPE = (4, 6, 8)


def params(
    block: tuple[int | None, ...],
    *,
    zero: bool = True,
    outer: tuple[int | None, ...] | None = None,
    constant: bool = True,
) -> tuple[QuantParams, torch.Tensor]:
    """Return parameters for a tensor of ``SHAPE``, and the scale."""
    b = GraphBuilder()
    spec = QuantSpec(torch.int8, -128, 127, block)
    scale = torch.rand([int(g) for g in spec.grid(SHAPE)]) + 0.1
    points = torch.randint(-9, 9, scale.shape)
    node = b.const("scale", scale) if constant else b.arg("scale", scale.dtype, *scale.shape)
    second = None if outer is None else b.const("outer", torch.ones(1, 1, 1))
    return QuantParams(spec, node, b.const("zero", points) if zero else None, second), scale


@pytest.mark.parametrize(
    ("block", "axis", "group", "count"),
    [
        ((None, None, None), 0, None, 1),
        ((None, None, None), -1, None, 1),
        ((1, None, None), 0, 1, 4),
        ((1, None, None), -3, 1, 4),
        ((None, None, 4), 2, 4, 2),
        ((None, None, 3), -1, 3, 3),
        ((4, None, 2), 2, 2, 4),
        ((1, 6, 8), 0, 1, 4),
    ],
)
@pytest.mark.parametrize("zero", [True, False])
def test_it_is_one_dimensional_along_the_axis(
    block: tuple[int | None, ...], axis: int, group: int | None, count: int, zero: bool
) -> None:
    given, scale = params(block, zero=zero)
    found = compact_params(given, axis)

    assert isinstance(found, CompactParams)
    assert found.axis == axis % 3
    assert found.group == group
    assert found.scale.shape == (count,)
    assert torch.equal(found.scale, scale.flatten())
    assert (found.zero_point is None) is not zero


def test_it_costs_nothing_at_run_time() -> None:
    given, scale = params((1, None, None))
    nodes = len(given.scale.graph.nodes)
    found = compact_params(given, 0)

    assert isinstance(found, CompactParams)
    assert found.scale.data_ptr() == scale.data_ptr()
    assert len(given.scale.graph.nodes) == nodes


@pytest.mark.parametrize(
    ("given", "axis", "why"),
    [
        (params((1, None, 4)), 0, "scales vary along the axes 0, 2"),
        (params((1, 1, None)), 1, "scales vary along the axes 0, 1"),
        (params((1, None, None)), 1, "scales vary along axis 0, not 1"),
        (params((None, None, 4)), 0, "scales vary along axis 2, not 0"),
        (params((None,) * 3, constant=False), 0, "its scale or zero point is computed at run time"),
        (params((None,) * 3, outer=(None,) * 3), 0, "the scale has a second level"),
    ],
)
def test_refuses(given: tuple[QuantParams, torch.Tensor], axis: int, why: str) -> None:
    found = compact_params(given[0], axis)

    assert isinstance(found, Refusal)
    assert found.reason == why


@pytest.mark.parametrize("axis", [3, -4])
def test_an_axis_that_is_not_there_is_an_error(axis: int) -> None:
    with pytest.raises(IndexError, match=f"no axis {axis}"):
        compact_params(params((None,) * 3)[0], axis)
