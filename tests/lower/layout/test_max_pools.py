from __future__ import annotations

import pytest
import torch

from qfuse.cost import CostModel, CostProfile
from qfuse.ir.graph.stage_graph import OptimizedGraph
from qfuse.lower import lower
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import run

aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize("size", [6, 20])
@pytest.mark.parametrize(
    "memory_format", [torch.contiguous_format, torch.channels_last], ids=["rows", "channels-last"]
)
def test_an_image_may_have_more_positions_than_its_values_count(
    dtype: torch.dtype, size: int, memory_format: torch.memory_format
) -> None:
    """torch raises for 20 x 20 channels-last positions of 8 bits."""
    b = GraphBuilder()
    x = b.arg("x", dtype, 2, 5, size, size)
    pooled = b.call(aten.max_pool2d.default, x, [3, 3], [2, 2], [1, 1])
    program = b.done(pooled, stage=OptimizedGraph)
    low = lower(program, Target.for_testing(), CostModel(CostProfile.pinned()), ())
    image = torch.randint(0, 127, (2, 5, size, size)).to(dtype)

    (y,) = run(low, [image.contiguous(memory_format=memory_format)])

    expected = torch.max_pool2d(image.float(), [3, 3], [2, 2], [1, 1])
    assert y.dtype is dtype
    assert torch.equal(y.float(), expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_a_window_of_padding_alone_has_the_least_value(dtype: torch.dtype) -> None:
    b = GraphBuilder()
    x = b.arg("x", dtype, 1, 1, 2, 2)
    pooled = b.call(aten.max_pool2d.default, x, [2, 2], [1, 1], [1, 1], [3, 3])
    program = b.done(pooled, stage=OptimizedGraph)
    image = torch.randint(0, 127, (1, 1, 2, 2)).to(dtype)
    expected = torch.max_pool2d(image, [2, 2], [1, 1], [1, 1], [3, 3])
    low = lower(program, Target.for_testing(), CostModel(CostProfile.pinned()), ())

    (y,) = run(low, [image])

    assert bool((y == torch.iinfo(dtype).min).any())
    assert torch.equal(y, expected)
