"""The public surface is this table: what users import, and nothing besides."""

from __future__ import annotations

import ast
import subprocess
import sys
import types
from pathlib import Path

import pytest

import qfuse
from tests.architecture.source import PACKAGE, Module, modules, write_tree

# A name enters or leaves the public surface here, in the CHANGELOG and in the README.
PUBLIC = {
    "BackendError",
    "CaptureError",
    "CompiledModel",
    "CompiledModelError",
    "ExtensionError",
    "GraphError",
    "InputError",
    "ModelFileError",
    "NormalizeError",
    "Options",
    "OptionsError",
    "OutOfMemoryError",
    "PlanError",
    "QfuseError",
    "Report",
    "StrictError",
    "Target",
    "TrainingError",
    "__version__",
    "bisect",
    "clear_reports",
    "compile",
    "explain",
    "inductor_options",
    "inductor_passes",
    "install",
    "lint",
    "load",
    "measure_accuracy",
    "optimize",
    "passes",
    "reports",
    "uninstall",
}


def stray_names(module: types.ModuleType) -> list[str]:
    """Names that look public although ``__all__`` does not list them."""
    return [
        name
        for name in dir(module)
        if not name.startswith("_")
        and name not in module.__all__
        and getattr(getattr(module, name), "__name__", None) != f"{module.__name__}.{name}"
    ]


def defines_names(module: Module) -> bool:
    """Whether the module holds more than a docstring and future imports."""
    return any(
        not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        and not (isinstance(node, ast.ImportFrom) and node.module == "__future__")
        for node in module.tree.body
    )


def lists_names(module: Module) -> bool:
    """Whether the module has ``__all__``."""
    return any(
        isinstance(node, ast.Assign | ast.AnnAssign) and ast.unparse(node).startswith("__all__")
        for node in module.tree.body
    )


def misplaced_all(package: Path) -> list[str]:
    """Package faces without ``__all__`` that define names, and other modules with one."""
    found = []
    for module in modules(package):
        face = module.path.name == "__init__.py" or module.name == "rewrite/prelude.py"
        if face and defines_names(module) and not lists_names(module):
            found.append(f"{module.name}: has no __all__")
        if not face and lists_names(module):
            found.append(f"{module.name}: only the face of a package has __all__")
    return found


def test_the_surface_is_the_table() -> None:
    assert set(qfuse.__all__) == PUBLIC
    assert len(qfuse.__all__) == len(PUBLIC)


def test_every_public_name_is_there() -> None:
    assert [name for name in qfuse.__all__ if not hasattr(qfuse, name)] == []


@pytest.mark.slow
def test_every_public_name_is_seen_before_it_is_used() -> None:
    """In a process of its own: what was asked for once is there."""
    script = "import qfuse; print(sorted(set(qfuse.__all__) - set(dir(qfuse))))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout.strip() == b"[]"


def test_nothing_else_looks_public() -> None:
    assert stray_names(qfuse) == []


def test_faces_of_packages_list_their_names() -> None:
    assert misplaced_all(PACKAGE) == []


def test_a_stray_name_is_found() -> None:
    module = types.ModuleType("shop")
    vars(module).update(
        __all__=["sell"],
        sell=len,
        annotations=1,
        torch=types.ModuleType("torch"),
        shelf=types.ModuleType("shop.shelf"),
        _till=0,
    )

    assert stray_names(module) == ["annotations", "torch"]


def test_a_misplaced_all_is_found(tmp_path: Path) -> None:
    package = write_tree(
        tmp_path,
        {
            "__init__.py": '"""Only a docstring."""',
            "ir/__init__.py": "x = 1",
            "ir/text.py": "__all__ = []",
            "lower/__init__.py": "__all__ = ['lower']",
            "lower/lower.py": "x = 1",
        },
    )

    assert misplaced_all(package) == [
        "ir/__init__.py: has no __all__",
        "ir/text.py: only the face of a package has __all__",
    ]
