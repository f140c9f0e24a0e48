"""A file that cannot be written: the error says what is missing, and nothing is made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qfuse.ir.errors import ModelFileError, OptionsError
from qfuse.ir.files import check_folder, check_replaceable, parse_json, write_output


def test_a_missing_folder_is_named_and_not_made(tmp_path: Path) -> None:
    file = tmp_path / "no" / "page.html"
    with pytest.raises(OptionsError, match="there is no folder") as error:
        write_output(file, "text")
    assert error.value.where == str(file)
    assert str(file.parent) in error.value.what
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ModelFileError, match="it is a folder"):
        check_folder(tmp_path, ModelFileError)


def test_what_the_system_refuses(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionsError, match="there is no folder"):
        write_output(tmp_path / "file" / "x", "text")
    with pytest.raises(OptionsError, match="cannot be written: File name too long"):
        write_output(tmp_path / ("x" * 300), "text")
    write_output(str(tmp_path / "file"), "text")
    assert (tmp_path / "file").read_text() == "text"


def test_a_device_or_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    for name in ("pipe", "/dev/null"):
        with pytest.raises(ModelFileError, match="it is a device or a pipe"):
            check_replaceable(tmp_path / name, ModelFileError)
    with pytest.raises(OptionsError, match="there is no folder"):
        check_replaceable(tmp_path / "no" / "file")
    for name in ("file", "new", "x" * 300):
        check_replaceable(tmp_path / name)


def test_json_that_is_nested_too_deeply_is_malformed() -> None:
    assert parse_json('{"a": [1]}') == {"a": [1]}
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 100_000)
