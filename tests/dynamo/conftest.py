"""What tests of the backend of ``torch.compile`` share."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

import qfuse


@pytest.fixture(autouse=True)
def _apart() -> Iterator[None]:
    """Forget what other tests compiled, and keep torch's own warnings to torch."""
    torch.compiler.reset()
    qfuse.clear_reports()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch(ao)?\.")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message=r".*isinstance\(treespec", category=FutureWarning)
        yield
    torch.compiler.reset()
