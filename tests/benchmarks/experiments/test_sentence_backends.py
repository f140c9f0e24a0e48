"""The backends of sentence-transformers are compared with qfuse's encoder."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support.bench.results import SETTING

from qfuse.ir.errors import OptionsError
from qfuse_bench.experiments.sentence_backends import (
    ONNX,
    OPENVINO,
    QFUSE,
    TORCH,
    SentenceOptions,
    rows_of,
)
from qfuse_bench.harness.measure import Series
from qfuse_bench.report.markdown import render

ENCODERS = (QFUSE, TORCH, ONNX, OPENVINO)
SERIES = {
    QFUSE: Series([0.002] * 15, [0.002] * 45),
    TORCH: Series([0.004] * 15, [0.004] * 45),
    ONNX: Series([0.001] * 15, [0.001] * 45),
}
FOUND = {
    QFUSE: [torch.tensor([[1.0, 0.0], [3.0, 4.0]])],
    TORCH: [torch.tensor([[1.0, 0.0], [0.0, 1.0]])],
    ONNX: [torch.tensor([[1.0, 0.0], [0.0, 1.0]])],
}
FAILED = {OPENVINO: "no module named optimum"}


def test_each_is_compared_with_qfuse_and_with_float() -> None:
    rows = {row.encoder: row for row in rows_of("b", ENCODERS, SERIES, FOUND, FAILED)}

    assert rows[QFUSE].versus == "-"
    assert rows[QFUSE].cosine == pytest.approx(0.8)
    assert rows[TORCH].versus.startswith("0.50 ")
    assert rows[ONNX].versus.startswith("2.00 ")
    assert rows[OPENVINO].failed == FAILED[OPENVINO]


def test_without_the_float_model_there_is_no_cosine() -> None:
    (row,) = rows_of("b", (ONNX,), {ONNX: SERIES[ONNX]}, {ONNX: FOUND[ONNX]}, {})

    assert row.versus == "-"
    assert math.isnan(row.cosine)


def test_the_page_says_what_did_not_run() -> None:
    rows = rows_of("b", ENCODERS, SERIES, FOUND, FAILED)
    text = render("sentence-backends", rows=rows, setting=SETTING, packages={"optimum": "2.1"})

    assert "optimum 2.1" in text
    assert "| b | onnx | 1.00 | 2.00" in text
    assert "| b | openvino | - | - | no module named optimum |" in text


def test_an_unknown_encoder_is_refused() -> None:
    with pytest.raises(OptionsError, match="'jax' is not an encoder"):
        SentenceOptions(encoders=("jax",))
