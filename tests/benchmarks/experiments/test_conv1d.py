"""Both forms of a convolution compute the same values, and every shape is measured."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console

from qfuse.ir.errors import OptionsError
from qfuse_bench.experiments.conv1d import (
    SHAPES,
    Conv1dOptions,
    Images,
    Sequences,
    Shape,
    run_conv1d,
)


def test_a_name_tells_all_that_differs_from_the_default() -> None:
    assert str(Shape(1, 500, 64, 32, 3)) == "1 x 64 x 500 to 32, kernel 3"
    assert str(Shape(2, 9, 8, 8, 4, stride=2, groups=4)) == (
        "2 x 8 x 9 to 8, kernel 4, stride 2, 4 groups"
    )
    assert len({str(shape) for shape in SHAPES}) == len(SHAPES)


@pytest.mark.parametrize("shape", [Shape(2, 9, 8, 16, 3, stride=2, groups=4), Shape(1, 1, 4, 4, 1)])
def test_both_forms_have_the_same_values(shape: Shape) -> None:
    layer = shape.layer()
    x = torch.randn(shape.batch, shape.channels, shape.length, dtype=torch.bfloat16)

    sequences, images = Sequences(layer)(x), Images(layer)(x)

    torch.testing.assert_close(images, sequences)
    assert images.stride() == sequences.stride()


@pytest.mark.compiler
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_measures_every_shape() -> None:
    console = Console(record=True, width=200)
    shapes = [Shape(1, 20, 8, 8, 3), Shape(1, 1, 1, 1, 1)]

    times = run_conv1d(Conv1dOptions(rounds=2), console, shapes)

    assert [(one.shape, len(one.sequences.rounds)) for one in times] == [(s, 2) for s in shapes]
    assert all(str(shape) in console.export_text(clear=False) for shape in shapes)


def test_refuses_to_measure_nothing() -> None:
    with pytest.raises(OptionsError, match="cannot be measured"):
        run_conv1d(Conv1dOptions(rounds=0), Console())
