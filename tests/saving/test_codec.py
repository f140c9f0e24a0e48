"""Values survive JSON with their types, and nothing else can be written or made."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import pytest
import torch

from qfuse.backends.layout import Layout
from qfuse.ir.errors import ModelFileError, OptionsError
from qfuse.ir.events import Checked, Exactness, MissCode, Missed, Place, RolledBack
from qfuse.ir.graph.stage_graph import InputSpec, SymbolRange
from qfuse.saving.codec import UnknownValueError, decoding, find_class, from_data, to_data

PLACE = Place("linear_3", "aten.linear", "model.py:7: self.fc(x)", "encoder.fc")
VALUES: dict[str, Any] = {
    "none": None,
    "bool": True,
    "int": -(2**70),
    "float": 0.1,
    "infinity": -math.inf,
    "complex": 1 - 2j,
    "text": "§ $tuple",
    "tuple": (1, (2.0,), ()),
    "list": [1, [None]],
    "dict": {"a": 1, "b": {"c": (2,)}},
    "a key like a tag": {"$tuple": [1]},
    "keys that are numbers": {1: "a", (2, True): "b"},
    "empty dict": {},
    "slice": slice(None, 3, 2),
    "ellipsis": ...,
    "dtype": torch.bfloat16,
    "layout": torch.strided,
    "memory format": torch.channels_last,
    "device": torch.device("cpu"),
    "class": dict,
    "input": InputSpec("x", "x", torch.int8, (2, "s0"), torch.device("cpu"), None, (1, 0)),
    "symbol": SymbolRange(1, 8, None, 4, "batch"),
    "layout of an input": Layout((1, 0), None, False),
    "missed": Missed("optimize", "lift", MissCode.RANGE, "why", PLACE, PLACE, 3, "a\n^"),
    "checked": Checked("check", "model", True, Exactness.ROUNDING, 0.0, math.inf),
    "rolled back": RolledBack("optimize", "lift", "key", (PLACE,), "why"),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_survive(name: str) -> None:
    value = VALUES[name]
    again = from_data(json.loads(json.dumps(to_data(value), allow_nan=False)))
    assert again == value
    assert type(again) is type(value)


def test_nan_and_size_survive() -> None:
    assert math.isnan(from_data(to_data(math.nan)))
    assert from_data(to_data(torch.Size([2, 3]))) == (2, 3)


@pytest.mark.parametrize("value", [object(), {1, 2}, b"x", torch.ones(1), lambda: 0, [object()]])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(UnknownValueError):
        to_data(value)


@pytest.mark.parametrize(
    "data",
    [
        {"$dtype": "ones"},
        {"$dtype": "ops.aten"},
        {"$system": "rm"},
        {"$qfuse.ir.events:Place": {"nodes": 1}},
        {"$qfuse.ir.events:EventLog": {"events": []}},
        {"$pathlib:Path": "x"},
        {"$slice": 3},
        {"$tuple": None},
        {"$qfuse.ir.events:MissCode": "none"},
        {"$device": "cpu:x"},
        {"$class": "antigravity:x"},
    ],
    ids=str,
)
def test_malformed_data_are_an_error_of_the_file(data: Any) -> None:
    with pytest.raises(ModelFileError, match="malformed") as error, decoding("a.qfuse"):
        from_data(data)
    assert error.value.where == "a.qfuse"
    assert error.value.fix is not None


def test_an_option_of_the_process_is_no_error_of_the_file() -> None:
    # Such as an unknown instruction set in QFUSE_ISA, when the kernels of a file are loaded.
    with pytest.raises(OptionsError, match="unknown"), decoding("a.qfuse"):
        raise OptionsError("unknown")


def test_nothing_is_imported() -> None:
    assert "this" not in sys.modules
    assert find_class("this:Zen") is None
    assert "this" not in sys.modules
    # A function of an imported module is not a class.
    assert find_class("os:system") is None
