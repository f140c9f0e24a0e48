"""The example packages, from their source folders."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from tests.architecture.source import ROOT


@pytest.fixture(scope="session")
def simulator() -> Iterator[ModuleType]:
    """The package ``simulator_dialect``."""
    place = str(ROOT / "examples" / "simulator_dialect" / "src")
    sys.path.insert(0, place)
    yield importlib.import_module("simulator_dialect")
    sys.path.remove(place)
