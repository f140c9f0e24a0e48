"""The import contracts of pyproject.toml: data flows one way, stages never import each other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT, STAGES, write_tree

RUN = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Run the contracts of ``root/pyproject.toml`` on ``root/src`` and ``root/benchmarks``."""
    return subprocess.run(
        [sys.executable, "-c", RUN, "--no-cache", "--no-logo"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root / 'benchmarks'}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def small_project(root: Path, files: dict[str, str]) -> Path:
    """The real contracts over a package that has every stage and ``files``."""
    shutil.copy(ROOT / "pyproject.toml", root)
    package = {f"src/qfuse/{stage}/__init__.py": "" for stage in ("", "ir", "rewrite", *STAGES)}
    extra = {"src/qfuse/_version.py": "", "benchmarks/qfuse_bench/__init__.py": ""}
    return write_tree(root, {**package, **extra, **files})


def test_contracts_hold() -> None:
    result = lint_imports(ROOT)

    assert result.returncode == 0, result.stdout + result.stderr


def test_contracts_hold_on_a_package_without_imports(tmp_path: Path) -> None:
    result = lint_imports(small_project(tmp_path, {}))

    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        (
            "optimize/fuse.py",
            "import qfuse.lower",
            "qfuse.optimize is not allowed to import qfuse.lower",
        ),
        (
            "lower/fold.py",
            "import qfuse.capture",
            "qfuse.lower is not allowed to import qfuse.capture",
        ),
        (
            "ir/views.py",
            "import qfuse.rewrite",
            "qfuse.ir is not allowed to import qfuse.rewrite",
        ),
        (
            "ir/text.py",
            "def late() -> None:\n    import qfuse.rewrite",
            "qfuse.ir is not allowed to import qfuse.rewrite",
        ),
        ("pipeline.py", "import qfuse.api", "qfuse.pipeline is not allowed to import qfuse.api"),
        (
            "lower/rival.py",
            "import qfuse_bench",
            "qfuse is not allowed to import qfuse_bench",
        ),
        (
            "lower/operands.py",
            "import qfuse.lower.kernels",
            "qfuse.lower.operands is not allowed to import qfuse.lower.kernels",
        ),
        ("misc.py", "", "The following modules are not listed as layers"),
        (
            "ir/ao.py",
            "import torchao",
            "qfuse.ir is not allowed to import torchao",
        ),
    ],
)
def test_contracts_can_fail(tmp_path: Path, file: str, text: str, complaint: str) -> None:
    others = {f"src/qfuse/{name}.py": "" for name in ("api", "pipeline", "lower/kernels")}
    project = small_project(tmp_path, {**others, f"src/qfuse/{file}": text})

    result = lint_imports(project)

    assert result.returncode != 0
    assert complaint in result.stdout
