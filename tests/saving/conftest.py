"""Saved models that many tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.backends import conftest as backends

from qfuse.backends import CompiledModule
from qfuse.ir.graph.stage_graph import LoweredGraph
from qfuse.report import Report
from qfuse.saving.load import read_model
from qfuse.saving.model import SavedModel
from qfuse.saving.save import save_model

# Compiled once for both folders.
cache_folder = backends.cache_folder
needs_compiler = backends.needs_compiler
projection = backends.projection
decode = backends.decode

Reload = Callable[[CompiledModule, LoweredGraph], SavedModel]


@pytest.fixture
def reload(tmp_path: Path) -> Reload:
    """Save a compiled graph and load it again, from a file that is removed then."""

    def again(module: CompiledModule, lowered: LoweredGraph) -> SavedModel:
        path = tmp_path / "model.qfuse"
        save_model(path, SavedModel(module, lowered, Report(()), "the plan", None))
        saved = read_model(path)
        path.unlink()
        return saved

    return again
