"""Both kernels compute the same values, and every shape is measured."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console

from qfuse import kernels
from qfuse.ir.errors import OptionsError
from qfuse_bench.experiments.attention import (
    SHAPES,
    AttentionOptions,
    AttentionShape,
    run_attention,
)


def test_a_name_tells_all_that_differs() -> None:
    assert str(AttentionShape(2, 4, 5, 6, 7)) == "2 x 4 heads, 5 x 6, 7 features"
    assert str(AttentionShape(1, 4, 5, 6, 7, shared=2, causal=True)) == (
        "1 x 4 over 2 heads, 5 x 6, 7 features, causal"
    )
    assert len({str(shape) for shape in SHAPES}) == len(SHAPES)


@pytest.mark.parametrize(
    "shape",
    [AttentionShape(2, 4, 20, 30, 8, masked=True), AttentionShape(1, 4, 20, 30, 8, 2, causal=True)],
)
def test_both_kernels_have_the_same_values(shape: AttentionShape) -> None:
    if not kernels.load().available:
        pytest.skip("needs qfuse's kernels")
    calls = shape.calls()

    torch.testing.assert_close(calls["qfuse"](), calls["torch"](), rtol=1e-5, atol=1e-6)


def test_measures_every_shape() -> None:
    if not kernels.load().available:
        pytest.skip("needs qfuse's kernels")
    console = Console(record=True, width=200)
    shapes = [AttentionShape(1, 2, 16, 5, 4), AttentionShape(2, 2, 17, 9, 4, masked=True)]

    times = run_attention(AttentionOptions(rounds=2), console, shapes)

    assert [len(series.rounds) for both in times for series in both.values()] == [2] * 4
    assert all(str(shape) in console.export_text(clear=False) for shape in shapes)


def test_refuses_to_measure_nothing() -> None:
    with pytest.raises(OptionsError, match="cannot be measured"):
        run_attention(AttentionOptions(rounds=0), Console())
