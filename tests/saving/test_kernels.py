"""The kernels in a saved model: every instruction set's, so that it runs on other machines."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.machine import needs_own_kernels
from tests.support.processes import run_python
from torch import nn

import qfuse
from qfuse import kernels
from qfuse.ir.errors import ModelFileError
from qfuse.kernels import KernelBuildError, KernelLibrary, paths
from qfuse.kernels.build import build
from qfuse.kernels.compilation.parts import CORE, PATHS
from qfuse.saving.container import open_file
from qfuse.zoo import recipes

pytestmark = [pytest.mark.own_kernels, pytest.mark.slow]

RUNNING = """
import torch, qfuse
from qfuse import kernels
fast = qfuse.load(%r)
args, _ = fast.examples
for name in (None, *kernels.load().instruction_sets):
    if name is None:
        print(fast(*args).tolist())
    else:
        with kernels.instruction_set(name):
            print(fast(*args).tolist())
"""


@pytest.fixture(scope="module")
def fast() -> qfuse.CompiledModel:
    needs_own_kernels()
    model = nn.Linear(40, 24).eval()
    args = (torch.randn(3, 40),)
    quantized = recipes.quantize(model, "w8a8-dynamic", args, {})
    return qfuse.compile(quantized.model, args, options={"backend": "eager", "prefer": "memory"})


def libraries(path: Path) -> list[str]:
    manifest: dict[str, Any] = open_file(path).manifest
    return [facts["name"].partition("-")[0] for facts in manifest["kernels"]["libraries"]]


def test_a_file_runs_on_every_instruction_set_without_a_compiler(
    fast: qfuse.CompiledModel, tmp_path: Path
) -> None:
    path, away = tmp_path / "model.qfuse", tmp_path / "nothing"
    fast.save(path)
    assert libraries(path) == ["qfuse_kernels", *(f"qfuse_kernels_{name}" for name in PATHS)]
    done = run_python(RUNNING % str(path), PATH="", CXX="", QFUSE_CACHE_DIR=str(away), QFUSE_ISA="")

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1 + len(torch.ops.qfuse.list_kernels())
    assert len(set(lines)) == 1
    assert not away.exists()


def test_without_a_compiler_what_is_missing_is_left_out(
    fast: qfuse.CompiledModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def lacking(compiler: object, part: str = CORE, **given: Any) -> tuple[Path, bool]:
        del compiler
        if part == "portable":
            raise KernelBuildError("no C++ compiler was found")
        return build(None, part, **given)

    monkeypatch.setattr(paths, "build", lacking)
    with caplog.at_level(logging.WARNING, logger="qfuse"):
        fast.save(tmp_path / "model.qfuse")

    assert "qfuse_kernels_portable" not in libraries(tmp_path / "model.qfuse")
    assert len(libraries(tmp_path / "model.qfuse")) == len(PATHS)
    assert "saved without the kernels for portable: no C++ compiler was found" in caplog.text


def test_kernels_that_do_not_run_here_are_refused(
    fast: qfuse.CompiledModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast.save(tmp_path / "model.qfuse")
    monkeypatch.setattr(kernels, "load_images", lambda _: KernelLibrary(False, "none for avx2"))
    with pytest.raises(ModelFileError, match="its kernels do not run here: none for avx2"):
        qfuse.load(tmp_path / "model.qfuse")
