"""A file that cannot be written: the error says what is missing, and nothing is made."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import qfuse
from qfuse.ir.errors import ModelFileError, OptionsError
from qfuse.ir.files import check_folder, parse_json, path_of, replaceable_file, write_output


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
    for name in ("pipe", "/dev/null", "/dev/new", "/dev/stdout", "/proc/self/fd/1", "/proc/new"):
        with pytest.raises(ModelFileError, match="it is a device, a pipe or") as error:
            replaceable_file(tmp_path / name, ModelFileError)
        assert error.value.where == str(tmp_path / name)
    with pytest.raises(OptionsError, match="there is no folder"):
        replaceable_file(tmp_path / "no" / "file")
    for name in ("file", "new", "x" * 300):
        assert replaceable_file(tmp_path / name) == tmp_path / name
    # Where processes share files.
    assert replaceable_file("/dev/shm/new") == Path("/dev/shm/new")


def test_a_link_leads_to_the_file_that_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").touch()
    (tmp_path / "folder").symlink_to("real")
    leads = {"file": "folder/file", "dangling": "real/new", "twice": "file"}
    for name, to in leads.items():
        (tmp_path / name).symlink_to(to)
    assert replaceable_file(tmp_path / "file") == tmp_path / "real" / "file"
    assert replaceable_file(tmp_path / "twice") == tmp_path / "real" / "file"
    assert replaceable_file(tmp_path / "dangling") == tmp_path / "real" / "new"
    assert replaceable_file(tmp_path / "folder" / "x") == tmp_path / "real" / "x"
    write_output(tmp_path / "dangling", "text")
    assert (tmp_path / "real" / "new").read_text() == "text"


def test_a_link_to_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    # The last one leads to a regular file, if that is the standard output.
    for number, to in enumerate((f"{tmp_path}/pipe", "/dev/null", "/dev/new", "/dev/stdout")):
        link = tmp_path / f"link{number}"
        link.symlink_to(to)
        with pytest.raises(OptionsError, match=f"leads to {to}, a device, a pipe or") as error:
            replaceable_file(link)
        assert "folder of your own" in str(error.value.fix)
    for name, target in (("lost", "no/such"), ("circle", "circle"), ("dir", ".")):
        (tmp_path / name).symlink_to(target)
    with pytest.raises(OptionsError, match="there is no folder"):
        replaceable_file(tmp_path / "lost")
    with pytest.raises(OptionsError, match="in a circle"):
        replaceable_file(tmp_path / "circle")
    with pytest.raises(OptionsError, match="it is a folder"):
        replaceable_file(tmp_path / "dir")


def test_json_that_is_nested_too_deeply_is_malformed() -> None:
    assert parse_json('{"a": [1]}') == {"a": [1]}
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 100_000)


@pytest.mark.parametrize(("given", "kind"), [(5, "an int"), (b"a", "a bytes"), (None, "None")])
def test_a_path_is_text_or_a_path(given: Any, kind: str) -> None:
    for of in (lambda: path_of(given, ModelFileError), lambda: qfuse.load(given)):
        with pytest.raises(
            ModelFileError, match=f"is a str or a pathlib.Path, not {kind}"
        ) as error:
            of()
        assert "model.qfuse" in str(error.value.fix)
    with pytest.raises(OptionsError, match=f"not {kind}"):
        write_output(given, "text")
