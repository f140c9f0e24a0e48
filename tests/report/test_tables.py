"""What the report's tables say."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import qfuse
from qfuse.ir.events import Event, Exactness, Fired, Left, MissCode, Missed, Place
from qfuse.report import Report

LINEAR = Place("linear", "aten.linear")
FACTS = {"backend": "eager"}
MISS = Missed("optimize", "fuse-linear", MissCode.NOT_QUANTIZED, "not quantized", LINEAR, LINEAR, 1)


def quantized_ops(report: Report) -> str:
    """The verdict in the row ``quantized ops``, or "" without that row."""
    (row,) = [line for line in str(report).splitlines() if "quantized ops" in line] or [""]
    return row.partition("quantized ops")[2].strip(" │")


def test_a_float_model_is_called_one() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    report = qfuse.explain(model, (torch.randn(2, 8),))

    assert report.closest_misses != ()
    assert quantized_ops(report).startswith("none: the model is not quantized")


@pytest.mark.parametrize(
    ("events", "verdict"),
    [
        ((), "none: the model is not quantized, or its quantization was not recognized"),
        ((MISS,), "none: the model is not quantized, or its quantization was not recognized"),
        ((MISS, Left("lower", LINEAR, "")), "none: the quantized ops could not be fused"),
    ],
)
def test_why_there_are_no_quantized_ops(events: tuple[Event, ...], verdict: str) -> None:
    assert quantized_ops(Report(events, FACTS)).startswith(verdict)


def test_passes_say_nothing_of_kernels() -> None:
    fired = Fired("optimize", "merge-linears", "merge-linears@a", Exactness.EXACT, (LINEAR,))
    text = str(Report((fired,), {"pass": "MergeLinears"}))

    assert "merge-linears 1" in text
    assert "quantized ops" not in text
    assert "left as they are" not in text
