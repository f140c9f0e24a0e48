"""What tests of the passes inside Inductor share."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep what is written to a folder of the test, and torch's own warnings to torch."""
    monkeypatch.setenv("QFUSE_CACHE_DIR", str(tmp_path / "qfuse"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch(ao)?\.")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield
