"""Both kernels compute the same values, and every shape is measured."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console

from qfuse import kernels
from qfuse.ir.dtypes import FLOATS
from qfuse.ir.errors import OptionsError
from qfuse.ir.quant.spec import parse_dtype
from qfuse_bench.experiments.attention import (
    SHAPES,
    AttentionOptions,
    AttentionShape,
    FloatDtype,
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
@pytest.mark.parametrize("dtype", FloatDtype)
def test_both_kernels_have_the_same_values(shape: AttentionShape, dtype: FloatDtype) -> None:
    if not kernels.load().available:
        pytest.skip("needs qfuse's kernels")
    calls = shape.calls(parse_dtype(dtype))

    own, torchs = calls["qfuse"](), calls["torch"]()
    error = {"float32": 1e-6, "bfloat16": 2**-6, "float16": 2**-9}[dtype]
    torch.testing.assert_close(own, torchs, rtol=10 * error, atol=error)


def test_measures_every_shape() -> None:
    if not kernels.load().available:
        pytest.skip("needs qfuse's kernels")
    console = Console(record=True, width=200)
    shapes = [AttentionShape(1, 2, 16, 5, 4), AttentionShape(2, 2, 17, 9, 4, masked=True)]

    times = run_attention(AttentionOptions(rounds=2, dtype=FloatDtype.BFLOAT16), console, shapes)

    assert [len(series.rounds) for both in times for series in both.values()] == [2] * 4
    assert "attention in bfloat16" in console.export_text(clear=False)
    assert all(str(shape) in console.export_text(clear=False) for shape in shapes)


def test_refuses_to_measure_nothing() -> None:
    with pytest.raises(OptionsError, match="cannot be measured"):
        run_attention(AttentionOptions(rounds=0), Console())


def test_every_float_dtype_can_be_measured() -> None:
    assert {parse_dtype(dtype) for dtype in FloatDtype} == set(FLOATS)
