"""The report as JSON: what is written is described by a schema, and read back."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.docs.test_tour import WRITE_VARIABLE
from tests.report.advice.models import Weighted, activations, static, weight
from tests.support.json_schema import violations
from torch import nn
from torch.nn.functional import linear

import qfuse
from qfuse.ir import events
from qfuse.ir.errors import OptionsError
from qfuse.ir.events import Checked, Event, Exactness, Lowered, MissCode, Missed, Place
from qfuse.report import Report
from qfuse.report.data import KINDS, SCHEMA, json_schema
from qfuse.report.facts import ClaimFacts, Facts, TargetFacts
from qfuse.report.frame import COLUMNS
from qfuse.targets import Target

SCHEMA_FILE = Path(qfuse.__file__).parent / "report" / "schema.json"
PLACE = Place("linear", "aten.linear", "model.py:1: y = f(x)", "layers.0")
FACTS = Facts(
    torch_version="2.13.0",
    created="2026-01-31T12:00:00Z",
    model="Model",
    target=TargetFacts("CPU", "x86_64", "AVX512", ("avx2",), 2),
    check="site",
    capture_seconds=1.5,
    constant_bytes=12,
    claims=(ClaimFacts("acme", 3, Exactness.LOSSY, used=False),),
)


def explained() -> Report:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU()).eval()
    return qfuse.explain(model, (torch.randn(4, 64),), target=Target.for_testing())


def changed(**values: Any) -> str:
    return json.dumps({**json.loads(Report((), FACTS).to_json()), **values})


def test_a_report_comes_back_from_its_json() -> None:
    report = explained()
    again = Report.from_json(report.to_json())

    assert again == report
    assert again.text(verbose=True) == report.text(verbose=True)


def test_numbers_that_json_lacks_come_back() -> None:
    check = Checked("check", "model", False, Exactness.EXACT, float("inf"), 0.0, "differs")
    text = Report((check,), FACTS).to_json()

    assert "Infinity" not in text
    assert Report.from_json(text) == Report((check,), FACTS)


def test_every_kind_of_event_has_a_name() -> None:
    kinds = {
        kind
        for kind in vars(events).values()
        if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
    }
    assert set(KINDS.values()) == kinds


def test_what_is_written_has_the_fields_of_the_schema() -> None:
    schema = json_schema()
    data = json.loads(explained().to_json())

    assert set(schema["properties"]) <= set(data)
    assert set(data["facts"]) == set(schema["$defs"]["Facts"]["properties"])
    names = {name: kind.__name__ for name, kind in KINDS.items()}
    for event in data["events"]:
        assert set(event) == set(schema["$defs"][names[event["kind"]]]["properties"])


def quantized() -> Report:
    """A report with a kernel, kernels that refused an op, and a product in float."""
    by_input = Weighted(lambda m, x: torch.relu(linear(static(x), weight(m, axis=1))))
    return qfuse.explain(by_input, activations(), target=Target.for_testing())


ODD = Report(
    (
        Checked("check", "model", False, Exactness.EXACT, math.inf, math.nan, "differs"),
        events.RolledBack("optimize", "rule", "key", (PLACE,), "wrong", "", math.inf, -math.inf),
        Lowered("lower", PLACE, "kernel", losers=(("other", "why"),)),
        Missed("optimize", "rule", MissCode.SHAPE, "no", PLACE, PLACE),
    ),
    FACTS,
)


@pytest.mark.parametrize("report", [explained, quantized, lambda: ODD, lambda: Report(())])
def test_what_is_written_fits_the_published_schema(report: Callable[[], Report]) -> None:
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))

    assert violations(json.loads(report().to_json()), schema) == []


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (changed(schema=2), "report.schema: 2 is not 1"),
        (changed(events=[{"kind": "left", "stage": "lower"}]), "fits 0 of 8"),
        (changed(facts={"constant_bytes": "many"}), "facts.constant_bytes: 'many' fits 0 of"),
        (changed(facts={"capture_seconds": "soon"}), "facts.capture_seconds: 'soon' fits 0 of"),
        (changed(facts={"model": 1}), "facts.model: 1 is not of type string"),
        (changed(events={}), "report.events: {} is not of type array"),
    ],
)
def test_the_published_schema_refuses_what_is_no_report(wrong: str, what: str) -> None:
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))

    assert any(what in line for line in violations(json.loads(wrong), schema))


def test_the_schema_of_this_version_does_not_change() -> None:
    """Removing or renaming a field takes a new version; adding one is written to the file."""
    made = json.dumps(json_schema(), indent=1, sort_keys=True) + "\n"
    if os.environ.get(WRITE_VARIABLE):
        SCHEMA_FILE.write_text(made, encoding="utf-8")
    assert SCHEMA_FILE.read_text(encoding="utf-8") == made


def test_facts_are_numbers_with_units_in_their_names() -> None:
    facts = explained().facts

    assert facts.model == "Sequential"
    assert facts.plan_seconds is not None
    assert facts.plan_seconds > 0
    assert facts.compile_seconds is None
    assert facts.constant_bytes == 64 * 65 * 4
    assert facts.target is not None
    assert facts.target.threads == 2
    assert facts.created.endswith("Z")


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("", "not JSON", "to_json"),
        ('{"schema": ', "not JSON", "to_json"),
        ("[1]", "not a report", "to_json"),
        ('{"facts": {}}', "it has no schema", "to_json"),
        ('{"schema": true}', "it has no schema", "to_json"),
        (changed(schema=SCHEMA + 1), "schema 2, and this qfuse reads schema 1", "upgrade qfuse"),
        (changed(schema=0), "schema 0", "make the report again"),
        (changed(events=[{"kind": "surprise"}]), "damaged: events.0", "to_json"),
        (changed(events=[{"kind": "left", "stage": "lower"}]), "events.0.left.place", "to_json"),
        (changed(facts={"constant_bytes": "many"}), "facts.constant_bytes", "to_json"),
    ],
)
def test_what_is_not_a_report_is_an_error_that_says_what_to_do(
    text: str, what: str, fix: str
) -> None:
    with pytest.raises(OptionsError) as error:
        Report.from_json(text)
    assert what in error.value.what
    assert fix in str(error.value.fix)


def test_a_frame_has_a_row_per_op(monkeypatch: pytest.MonkeyPatch) -> None:
    class Frame:
        def __init__(self, rows: list[dict[str, Any]], columns: list[str]) -> None:
            self.rows, self.columns = rows, columns

        def astype(self, types: dict[str, type]) -> Frame:
            assert list(types) == self.columns
            return self

    class Pandas:
        DataFrame = Frame

    monkeypatch.setitem(sys.modules, "pandas", Pandas)
    lowered = Lowered("lower", PLACE, "kernel", "int8", 1e-6)
    left = events.Left("lower", Place("q", "qfuse.quantize"), "because")
    size = events.Estimated("lower", PLACE, 64, 2e-6, 1e-6)
    miss = Missed("optimize", "rule", MissCode.SHAPE, "no", PLACE, PLACE)
    frame = Report((size, lowered, left, miss), FACTS).to_dataframe()

    assert [row["kind"] for row in frame.rows] == ["lowered", "left"]
    assert frame.rows[0]["predicted_seconds"] == 1e-6
    assert frame.rows[0]["multiply_adds"] == 64
    assert frame.rows[1]["reason"] == "because"
    assert set(frame.columns) == set(frame.rows[0])


def every_kind() -> Report:
    """Rows of each kind: lowered with and without a time, left with and without one."""
    places = [replace(PLACE, node=f"node_{i}") for i in range(4)]
    return Report(
        (
            events.Estimated("lower", places[0], 64, 2e-6, 1e-6),
            events.Lowered("lower", places[0], "qfuse.linear_w8a8", "int8", 1e-6),
            events.Lowered("lower", places[1], events.EXPAND, "gelu"),
            events.Estimated("lower", places[2], 0, 3e-6),
            events.Left("lower", places[2], "because"),
            events.Left("lower", places[3], "because"),
        )
    )


@pytest.mark.parametrize("rows", ["none", "all", "without times"])
def test_columns_of_a_data_frame_have_their_types_whatever_the_rows(rows: str) -> None:
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    kept = {"none": [], "all": every_kind().events, "without times": every_kind().events[2:3]}
    frame = Report(tuple(kept[rows])).to_dataframe()

    types = pandas.api.types
    assert len(frame) == {"none": 0, "all": 4, "without times": 1}[rows]
    for name, kind in COLUMNS.items():
        column = frame[name]
        assert types.is_float_dtype(column) == (kind is float), name
        assert types.is_integer_dtype(column) == (kind is int), name
        assert (kind is str) == (column.dtype == pandas.Series(["a"]).dtype), name
    assert frame["predicted_seconds"].sum() == pytest.approx(4e-6 if rows == "all" else 0)


def test_a_data_frame_has_the_values_of_the_report() -> None:
    pytest.importorskip("pandas", reason="needs pandas")
    frame = every_kind().to_dataframe()

    assert list(frame["node"]) == ["node_0", "node_1", "node_2", "node_3"]
    assert list(frame["kind"]) == ["lowered", "lowered", "left", "left"]
    assert list(frame["multiply_adds"]) == [64, 0, 0, 0]
    assert list(frame["predicted_seconds"].isna()) == [False, True, False, True]
    assert list(frame["float_seconds"].dropna()) == [2e-6, 3e-6]


def test_a_frame_without_pandas_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(OptionsError, match="pip install pandas"):
        Report(()).to_dataframe()
