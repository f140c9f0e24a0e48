"""The public surface is this table: what users import, and nothing besides."""

from __future__ import annotations

import ast
import subprocess
import sys
import types
from typing import TYPE_CHECKING

import qfuse
from tests.architecture.source import PACKAGE, Module, modules, write_tree

if TYPE_CHECKING:
    from pathlib import Path

# A name enters or leaves the public surface here, in the CHANGELOG and in the README.
PUBLIC = {
    "BackendError",
    "CaptureError",
    "CompiledModel",
    "GraphError",
    "InputError",
    "NormalizeError",
    "Options",
    "OptionsError",
    "QfuseError",
    "Report",
    "Target",
    "__version__",
    "clear_reports",
    "compile",
    "explain",
    "inductor_options",
    "inductor_passes",
    "install",
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


def without_all(package: Path) -> list[str]:
    """Public modules that do not say what they export."""
    return [
        module.name
        for module in modules(package)
        if not any(part.startswith("_") for part in module.parts)
        and defines_names(module)
        and not any(
            isinstance(node, ast.Assign | ast.AnnAssign) and ast.unparse(node).startswith("__all__")
            for node in module.tree.body
        )
    ]


def test_the_surface_is_the_table() -> None:
    assert set(qfuse.__all__) == PUBLIC
    assert len(qfuse.__all__) == len(PUBLIC)


def test_every_public_name_is_there() -> None:
    assert [name for name in qfuse.__all__ if not hasattr(qfuse, name)] == []


def test_every_public_name_is_seen_before_it_is_used() -> None:
    """In a process of its own: what was asked for once is there."""
    script = "import qfuse; print(sorted(set(qfuse.__all__) - set(dir(qfuse))))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout.strip() == b"[]"


def test_nothing_else_looks_public() -> None:
    assert stray_names(qfuse) == []


def test_public_modules_say_what_they_export() -> None:
    assert without_all(PACKAGE) == []


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


def test_a_module_without_all_is_found(tmp_path: Path) -> None:
    package = write_tree(
        tmp_path,
        {
            "__init__.py": '"""Only a docstring."""',
            "ir/ops.py": "x = 1",
            "ir/text.py": "__all__ = []",
            "ir/_private.py": "x = 1",
        },
    )

    assert without_all(package) == ["ir/ops.py"]
