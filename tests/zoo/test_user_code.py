"""A factory in a file or a module: found, and its errors with the line of the user."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from qfuse.ir.errors import OptionsError, QfuseError
from qfuse.zoo.resolve import load_model
from qfuse.zoo.user_code import UserCode

GOOD = """
from dataclasses import dataclass
from torch import nn
from qfuse_user_sizes import WIDTH

@dataclass
class Sizes:
    width: "int" = WIDTH

def make(rows=1):
    from qfuse_user_sizes import WIDTH  # while it is called, too
    return nn.Linear(Sizes().width, 2)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder beside the folder of the user's files."""
    (tmp_path / "work").mkdir()
    (tmp_path / "code").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    for name in ("qfuse_user_model", "qfuse_user_sizes", "qfuse_user_text"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path / "code"


@pytest.mark.parametrize("name", ["qfuse_user_model", "json"])
def test_a_factory_in_a_file(folder: Path, name: str) -> None:
    """Also under the name of another module, which stays what it is."""
    (folder / f"{name}.py").write_text(GOOD)
    (folder / "qfuse_user_sizes.py").write_text("WIDTH = 4")
    path, before = list(sys.path), sys.modules.get("json")

    found = load_model(f"../code/{name}.py:make", {"rows": "2"})

    assert getattr(found.model, "in_features", None) == 4
    assert sys.path == path
    assert sys.modules.get("json") is before


@pytest.mark.parametrize(
    ("text", "words", "line"),
    [
        ("def make(:\n    pass", "importing {} fails with SyntaxError: invalid syntax", "1: def make"),
        ("def make():\npass", "fails with IndentationError: expected an indented block", "2: pass"),
        ("x = 1\ny = x.z", "fails with AttributeError: 'int' object has no attribute", "2: y = x.z"),
        ("import qfuse_user_absent", "fails with ModuleNotFoundError: No module named", "1: import"),
        ("class Own(Exception): pass\nraise Own('mine')", "fails with Own: mine", "2: raise Own"),
        ("import sys\nsys.exit(3)", r"it ends the process \(SystemExit: 3\)", "2: sys.exit(3)"),
        ("def make():\n    raise StopIteration", "the factory failed with StopIteration", "2: raise"),
        ("from torch import nn\ndef make():\n    return nn.Linear(-1, 'a')",
         "the factory failed with TypeError", "3: return nn.Linear"),
    ],
    ids=lambda value: value.splitlines()[0],
)  # fmt: skip
@pytest.mark.parametrize("as_file", [True, False], ids=["file", "module"])
def test_errors_of_the_users_code_say_where_they_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str, line: str, as_file: bool
) -> None:
    file = folder / "qfuse_user_text.py"
    file.write_text(text)
    monkeypatch.chdir(folder)
    spec = file.name if as_file else file.stem

    with pytest.raises(OptionsError, match=words.format(spec)) as raised:
        load_model(f"{spec}:make")

    assert (raised.value.where or "").startswith(f"{file}:{line}")
    assert raised.value.fix
    assert "qfuse_user_text" not in sys.modules or "factory" in words


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("absent.py:make", "there is no such file"),
        ("folder.py:make", "this is a folder"),
        ("empty.py:make", "empty.py has no 'make'"),
        ("binary.py:make", "importing binary.py fails with"),
        ("..qfuse_user:make", "importing ..qfuse_user fails with TypeError"),
    ],
)
def test_what_is_no_file_of_python(
    folder: Path, monkeypatch: pytest.MonkeyPatch, spec: str, words: str
) -> None:
    monkeypatch.chdir(folder)
    (folder / "folder.py").mkdir()
    (folder / "empty.py").touch()
    (folder / "binary.py").write_bytes(b"\x00\xff\xfe")

    with pytest.raises(OptionsError, match=words) as raised:
        load_model(spec)

    assert raised.value.fix


@pytest.mark.parametrize("error", [QfuseError("ours"), KeyboardInterrupt()], ids=repr)
def test_errors_of_qfuse_and_interrupts_pass(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, UserCode("it fails", "do so"):
        raise error
    assert raised.value is error
