"""A benchmark of kernels that cannot be built says why."""

from __future__ import annotations

import pytest

from qfuse.ir.errors import OptionsError
from qfuse.kernels import KernelLibrary
from qfuse_bench.harness import own_kernels


def test_without_kernels_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = KernelLibrary(available=False, reason="no C++ compiler was found")
    monkeypatch.setattr(own_kernels, "load", lambda: missing)

    with pytest.raises(OptionsError, match=r"no kernels to measure: no C\+\+ compiler was found"):
        own_kernels.load_kernels()
