"""The page on kernels runs: its first block is a file of its own, the others use it."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from qfuse.kernels import KernelLibrary
from qfuse.lower.kernels.registry import all_kernels

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "adding-a-kernel.md"
NAME = "kernel_of_the_docs"


def blocks() -> list[str]:
    """The Python blocks of the page."""
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the first block."""
    path = tmp_path / f"{NAME}.py"
    path.write_text(blocks()[0])
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, NAME, module)
    spec.loader.exec_module(module)
    return module


def test_the_kernel_of_the_page_is_selected_and_right(kernel: ModuleType) -> None:
    first, *others = blocks()
    assert "class FloatWeight" in first
    assert any("assert selected_kernel" in block for block in others)
    known: dict[str, Any] = {"FloatWeight": kernel.FloatWeight}
    for block in others:
        exec(compile(block, str(PAGE), "exec"), known)
    assert known["why"] == "a float copy of 2097152 weights is too large"


def test_every_kernel_has_a_file_that_only_the_registry_imports() -> None:
    """Adding one touches two files: nothing else names the kernels."""
    source = Path(sys.modules[all_kernels.__module__].__file__ or "").parents[2]
    library = KernelLibrary(available=False, reason="not needed here")
    for kernel in all_kernels(library):
        kind = type(kernel)
        naming = {
            path.relative_to(source).as_posix()
            for path in source.rglob("*.py")
            if re.search(rf"\b{kind.__name__}\b", path.read_text())
        }
        own = f"{kind.__module__.removeprefix('qfuse.').replace('.', '/')}.py"
        assert naming == {own, "lower/kernels/registry.py"}, kind.__name__
