"""Files appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qfuse.targets import cache_directory, write_atomically


def test_the_variable_chooses_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFUSE_CACHE_DIR", str(tmp_path / "here"))
    assert cache_directory() == tmp_path / "here"
    assert not cache_directory().exists()
    monkeypatch.setenv("QFUSE_CACHE_DIR", "~/there")
    assert cache_directory() == Path.home() / "there"


def test_the_users_cache_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for unset in (None, ""):
        if unset is None:
            monkeypatch.delenv("QFUSE_CACHE_DIR", raising=False)
        else:
            monkeypatch.setenv("QFUSE_CACHE_DIR", unset)
        assert cache_directory().name == "qfuse"
        assert cache_directory().is_absolute()


def test_writing_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    write_atomically(path, "old")
    write_atomically(path, "new")

    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    write_atomically(path, "old")

    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")

    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_others_may_read_a_file_where_the_umask_lets_them(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_atomically(tmp_path / "plan.json", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "plan.json").stat().st_mode & 0o777 == 0o644
