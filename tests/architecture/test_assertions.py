"""Every test asserts something, every golden test shows its text, every rule's refusal its code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.source import ROOT, Module, modules, write_tree

TESTS = ROOT / "tests"
# Calls that fail if what they look at is wrong, besides helpers named `assert_...` or `check_...`.
RAISING = {"raises", "warns", "fail", "opcheck"}
GOLDEN = "assert_expected_inline"


def called_names(node: ast.AST) -> Iterator[str]:
    """The last name of everything that is called below ``node``."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            match call.func:
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    yield name
                case _:
                    pass


def asserts(test: ast.FunctionDef) -> bool:
    """Whether a test asserts something, itself or by a helper whose name says so."""
    if any(isinstance(node, ast.Assert) for node in ast.walk(test)):
        return True
    return any(
        name in RAISING or name in {"assert", "check"} or name.startswith(("assert_", "check_"))
        for name in called_names(test)
    )


def shows_text(test: ast.FunctionDef) -> bool:
    """Whether a test compares with a text that stands in it."""
    return any(
        isinstance(call, ast.Call)
        and GOLDEN in called_names(ast.Expr(call))
        and any(isinstance(arg, ast.Constant) and str(arg.value).strip() for arg in call.args)
        for call in ast.walk(test)
    )


def names_code(test: ast.FunctionDef) -> bool:
    """Whether a test asserts the code of a refusal."""
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "MissCode"
        for node in ast.walk(test)
    )


def functions_of(module: Module) -> Iterator[ast.FunctionDef]:
    """The test functions of a file, in classes too."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node


def weak(folder: Path) -> list[str]:
    """Tests that cannot fail, and golden tests that show nothing."""
    found = []
    for module in modules(folder):
        if not module.path.name.startswith("test_"):
            continue
        for test in functions_of(module):
            if not asserts(test):
                found.append(module.at(test, f"{test.name} asserts nothing"))
            if test.name.startswith("test_golden") and not shows_text(test):
                found.append(module.at(test, f"{test.name} shows no text"))
    return found


def test_every_test_asserts_something() -> None:
    assert weak(TESTS) == []


TEXT = 'assert_expected_inline(to_text(g), """%x: float32[2]""")'


@pytest.mark.parametrize(
    ("body", "complaints"),
    [
        ("assert x == 1", []),
        ("assert_same(x, 1)", []),
        ("case.check(x)", []),
        ("check_graph(x)", []),
        ("torch.testing.assert_close(x, 1)", []),
        ("with pytest.raises(ValueError):\n        f()", []),
        ("torch.library.opcheck(op, ())", []),
        ("for case in cases:\n        assert case", []),
        ("f()", ["asserts nothing"]),
        ("same(x, 1)", ["asserts nothing"]),
        ("unasserted_(x)", ["asserts nothing"]),
        ("raise ValueError", ["asserts nothing"]),
    ],
)
def test_a_test_that_cannot_fail_is_found(tmp_path: Path, body: str, complaints: list[str]) -> None:
    files = {
        "a/test_it.py": f"def test_it():\n    {body}\n",
        "b/test_it.py": f"class TestIt:\n    def test_it(self):\n        {body.replace(chr(10), chr(10) + '    ')}\n",
        "support/it.py": "def test_it(): f()\n",
    }

    found = [text.partition("test_it ")[2] for text in weak(write_tree(tmp_path, files))]

    assert found == complaints * 2


@pytest.mark.parametrize(
    ("body", "complaints"),
    [
        (TEXT, []),
        ("assert calls(g) == []", ["shows no text"]),
        ("assert_expected_inline(to_text(g), '')", ["shows no text"]),
        ("assert_expected_inline(to_text(g), text)", ["shows no text"]),
        (f"assert_something()\n    {TEXT}", []),
    ],
)
def test_a_golden_test_without_its_text_is_found(
    tmp_path: Path, body: str, complaints: list[str]
) -> None:
    tree = write_tree(tmp_path, {"test_it.py": f"def test_golden():\n    {body}\n"})

    assert [text.partition("test_golden ")[2] for text in weak(tree)] == complaints
