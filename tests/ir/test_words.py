"""Words of messages that depend on what they name."""

from __future__ import annotations

import pytest
import torch

from qfuse.ir.words import a_kind, with_article


@pytest.mark.parametrize("noun", ["int", "ExportedProgram", "ndarray", "LSTM", "UntypedStorage"])
def test_an(noun: str) -> None:
    assert with_article(noun) == f"an {noun}"


@pytest.mark.parametrize("noun", ["str", "uint8", "UserDict", "Linear", "Node", "GRU", "X", "dict"])
def test_a(noun: str) -> None:
    assert with_article(noun) == f"a {noun}"


def test_kinds() -> None:
    assert a_kind(3) == "an int"
    assert a_kind(torch.nn.Embedding(2, 2)) == "an Embedding"
    assert a_kind(None) == "None"
