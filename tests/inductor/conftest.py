"""What tests of the passes inside Inductor share."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep what is written to a folder of the test, and torch's own warnings to torch.

    A graph that an earlier run left in torch's caches would come without its report, which was in
    the folder of that run.
    """
    monkeypatch.setenv("QFUSE_CACHE_DIR", str(tmp_path / "qfuse"))
    inductor: Any = importlib.import_module("torch._inductor.config")
    functorch: Any = importlib.import_module("torch._functorch.config")
    with (
        inductor.patch(fx_graph_cache=False),
        functorch.patch(enable_autograd_cache=False),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", module=r"torch(ao)?\.")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        # Torch copies what it deprecated, in a frame of `copyreg`.
        warnings.filterwarnings("ignore", message=r".*isinstance\(treespec", category=FutureWarning)
        yield
