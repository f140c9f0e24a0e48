"""Compiling blocks once beside one package: rows, and the page."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from tests.support.bench.results import SETTING

from qfuse.ir.errors import OptionsError
from qfuse_bench.experiments.block_time import BlockOptions, BlockRow, seconds_text
from qfuse_bench.harness.comparison import Entry, Verdict
from qfuse_bench.harness.measure import Series
from qfuse_bench.report.markdown import render

WHOLE = Entry(
    "one package",
    Verdict.OK,
    series=Series([0.010] * 20, [0.010] * 60),
    sqnr=math.inf,
    facts={"seconds": 38.64, "load_seconds": 0.5, "outcome": "one package"},
)
BLOCKS = Entry(
    "blocks",
    Verdict.OK,
    series=Series([0.0102] * 20, [0.0102] * 60),
    sqnr=math.inf,
    facts={"seconds": 23.3, "load_seconds": 0.25, "outcome": "the graph repeats a block 32 times"},
)
FAILED = Entry("blocks", Verdict.FAILED, "it fell over")


def test_a_row_compares_calls_and_bits() -> None:
    row = BlockRow(32, 1024, WHOLE, BLOCKS)

    assert row.call_ratio is not None
    assert row.call_ratio.value == pytest.approx(1.02)
    assert row.equal_bits == "yes"
    assert replace(row, blocks=replace(BLOCKS, sqnr=80.0)).equal_bits == "no"
    assert row.outcome == "the graph repeats a block 32 times"


def test_a_form_that_fails_says_why() -> None:
    row = BlockRow(32, 1024, WHOLE, FAILED)

    assert row.call_ratio is None
    assert row.equal_bits == "-"
    assert row.outcome == "it fell over"


def test_the_page_has_a_row_per_model() -> None:
    rows = [BlockRow(32, 1024, WHOLE, BLOCKS), BlockRow(4, 256, WHOLE, FAILED)]
    text = render(
        "blocks",
        rows=rows,
        options=BlockOptions(),
        setting=SETTING,
        others=0.0,
        seconds=seconds_text,
    )

    assert "| 38.6 (0.50) | 23.3 (0.25) | 10.0 (10.0) | 10.2 (10.2) | 1.02 [1.02, 1.02] |" in text
    assert "| 4 | 256 | 38.6 (0.50) | - | 10.0 (10.0) | failed | - | - | - / - |" in text
    assert "- 4 layers of 256: it fell over." in text


def test_values_for_json_are_numbers() -> None:
    values = BlockRow(32, 1024, WHOLE, BLOCKS).to_dict()

    assert "Infinity" not in json.dumps(values)
    assert (values["equal_bits"], values["blocks"]["facts"]["seconds"]) == ("yes", 23.3)


def test_a_model_has_heads_of_64() -> None:
    sizes = BlockOptions().sizes(32, 1024)
    assert (sizes["heads"], sizes["kv_heads"], sizes["intermediate"]) == (16, 8, 2816)
    assert "kv_heads" not in BlockOptions(model="bert").sizes(24, 768)


@pytest.mark.parametrize("given", [{"rounds": 2}, {"threads": -1}])
def test_what_cannot_be_measured_is_refused(given: dict[str, int]) -> None:
    with pytest.raises(OptionsError):
        BlockOptions(**given)  # type: ignore[arg-type]
