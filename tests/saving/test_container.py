"""Files: damage is found before anything of them is used, and writing leaves all or nothing."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qfuse.ir.errors import ModelFileError
from qfuse.saving import container
from qfuse.saving.container import is_model_file, open_bytes, open_file, write_bytes, write_file

FACTS = {"qfuse": "1.2", "torch": "2.13.0"}
MEMBERS: dict[str, list[bytes | memoryview]] = {
    "empty": [b""],
    "code": [b"x" * 5000],
    "weights": [b"ab", memoryview(b"cd" * 4000)],
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.qfuse"
    write_file(path, FACTS, MEMBERS)
    return path


def load(path: Path) -> None:
    open_file(path).verify()


def test_members_come_back(file: Path) -> None:
    opened = open_file(file)
    opened.verify()
    assert opened.manifest == {"format": 1, **FACTS}
    assert {name: opened.read(name) for name in MEMBERS} == {
        name: b"".join(bytes(part) for part in parts) for name, parts in MEMBERS.items()
    }
    assert opened.place("code")[0] % 4096 == 0
    assert "other" not in opened
    assert is_model_file(file)


def test_bytes_are_those_of_the_file(file: Path) -> None:
    data = write_bytes(FACTS, MEMBERS)
    assert data == file.read_bytes()
    assert open_bytes(data, "a pickle").read("code") == b"x" * 5000


def test_a_file_that_is_mapped_may_be_replaced_and_written(file: Path) -> None:
    opened = open_file(file)
    write_file(file, FACTS, {"code": [b"y" * 5000]})
    assert opened.read("code") == b"x" * 5000
    again = open_file(file)
    begin, _ = again.place("code")
    block: Any = again.block
    block[begin : begin + 1] = b"z"  # a private copy of the page
    assert open_file(file).read("code") == b"y" * 5000


def edit(path: Path, change: Callable[[bytearray], object]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def flip(position: int) -> Callable[[bytearray], object]:
    def change(data: bytearray) -> None:
        data[position] ^= 1

    return change


def cut(size: int) -> Callable[[bytearray], object]:
    return lambda data: data.__delitem__(slice(size, None))


def with_manifest(**changes: Any) -> Callable[[bytearray], object]:
    """Change the manifest, and its length and digest with it."""

    def change(data: bytearray) -> None:
        (length,) = struct.unpack_from("<Q", data, 16)
        manifest = {**json.loads(data[64 : 64 + length]), **changes}
        text = json.dumps(manifest).encode().ljust(length)
        assert len(text) == length
        data[24:56] = hashlib.sha256(text).digest()
        data[64 : 64 + length] = text

    return change


DAMAGE: dict[str, tuple[Callable[[bytearray], object], str]] = {
    "nothing in it": (cut(0), "it is empty"),
    "half a header": (cut(30), "truncated: it has 30 bytes"),
    "half a manifest": (cut(100), "damaged or truncated"),
    "no members": (cut(4096), "truncated: it has 4096 bytes"),
    "without the last byte": (cut(-1), "truncated"),
    "one byte more": (lambda data: data.append(0), "too long"),
    "another magic": (flip(1), "not a compiled model"),
    "line ends of a text": (lambda d: d.__setitem__(slice(0, 16), bytes(d[:16]).replace(b"\r\n", b"\n\n")), "not a compiled"),
    "another length": (flip(16), "damaged or truncated"),
    "a huge length": (lambda d: d.__setitem__(slice(16, 24), b"\xff" * 8), "damaged or truncated"),
    "another digest": (flip(30), "damaged or truncated"),
    "one bit of the manifest": (flip(70), "damaged or truncated"),
    "one bit of the code": (flip(4096 + 17), "bytes of 'code'"),
    "one bit of the weights": (flip(-5), "bytes of 'weights'"),
    "one bit before the manifest": (flip(60), "bytes between its parts"),
    "one bit before the code": (flip(4095), "bytes between its parts"),
    "one bit before the weights": (flip(4096 + 5000), "bytes between its parts"),
    "a newer format": (with_manifest(format=2), r"format 2, and .* reads 1"),
    "a zip archive": (lambda d: d.__setitem__(slice(0, 4), b"PK\x03\x04"), "not a compiled model"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found(file: Path, damage: str) -> None:
    change, words = DAMAGE[damage]
    edit(file, change)
    with pytest.raises(ModelFileError, match=words) as error:
        load(file)
    assert error.value.where == str(file)
    assert error.value.fix is not None


def test_every_byte_is_covered(file: Path) -> None:
    """Those of the padding between members too, which nothing reads."""
    whole = file.read_bytes()
    (length,) = struct.unpack_from("<Q", whole, 16)
    ends = [begin + size for begin, size in map(open_file(file).place, MEMBERS)]
    edges = [56, 63, 64 + length, 4095, *(e + n for e in ends[:-1] for n in (0, -e % 4096 - 1))]
    for position in [*range(0, len(whole), 97), *edges]:
        data = bytearray(whole)
        data[position] ^= 0x40
        with pytest.raises(ModelFileError):
            open_bytes(bytes(data), "a file").verify()


@pytest.mark.parametrize("where", ["missing.qfuse", "."])
def test_there_is_no_such_file(tmp_path: Path, where: str) -> None:
    with pytest.raises(ModelFileError, match="cannot be read") as error:
        load(tmp_path / where)
    assert error.value.where == str(tmp_path / where)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("call", ["fsync", "flush"])
def test_a_full_disk_leaves_the_old_file(
    file: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    before = file.read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if call == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    else:
        monkeypatch.setattr(container, "_layout", full)
    with pytest.raises(ModelFileError, match=r"disk is full: the model takes 0\.0 MB"):
        write_file(file, FACTS, {"code": [b"new"]})
    assert file.read_bytes() == before
    assert left(file.parent) == [file.name]


def test_an_interrupt_leaves_the_old_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_file(file, FACTS, {"code": [b"new"]})
    assert left(file.parent) == [file.name]
    load(file)


def test_a_limit_of_the_size_of_files(tmp_path: Path) -> None:
    script = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from qfuse.ir.errors import ModelFileError\n"
        "from qfuse.saving.container import write_file\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n"
        "    write_file(Path(sys.argv[1]), {}, {'weights': [bytes(1_000_000)]})\n"
        "except ModelFileError as error:\n"
        "    print(error)\n"
    )
    path = tmp_path / "model.qfuse"
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": "src"},
    )  # fmt: skip
    assert "the disk is full: the model takes 1.0 MB (File too large)" in done.stdout
    assert left(tmp_path) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 100_000


def test_space_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free, total = 10_000, 20_000

    def create(_: Path) -> None:
        raise AssertionError("nothing is written")

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage)
    monkeypatch.setattr(container, "_create", create)
    with pytest.raises(ModelFileError, match="disk is full"):
        write_file(tmp_path / "model.qfuse", FACTS, MEMBERS)


def test_a_folder_that_takes_no_files_is_not_a_full_disk() -> None:
    if not Path("/proc/self").is_dir():
        pytest.skip("needs /proc")
    with pytest.raises(ModelFileError, match="cannot be written") as error:
        write_file(Path("/proc/model.qfuse"), FACTS, MEMBERS)
    assert "full" not in str(error.value)


def test_of_a_link_the_file_that_it_leads_to_is_written(file: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link, dangling = tmp_path / "link", tmp_path / "dangling"
    link.symlink_to(file)
    dangling.symlink_to("there/new.qfuse")
    for path in (link, dangling):
        write_file(path, {"qfuse": "2"}, MEMBERS)
        assert path.is_symlink()
        assert open_file(path).manifest == {"format": 1, "qfuse": "2"}
    assert open_file(file).manifest == {"format": 1, "qfuse": "2"}
    assert left(tmp_path / "there") == ["new.qfuse"]
    assert left(tmp_path) == ["dangling", "link", file.name, "there"]


@pytest.mark.parametrize("where", ["no/such/folder/m.qfuse", "."])
def test_a_path_that_cannot_be_written(tmp_path: Path, where: str) -> None:
    with pytest.raises(ModelFileError, match="cannot be written") as error:
        write_file(tmp_path / where, FACTS, MEMBERS)
    assert error.value.where == str(tmp_path / where)
    assert left(tmp_path) == []


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "a[1].qfuse"
    stale, fresh = (tmp_path / f".a[1].qfuse.{name}.tmp" for name in ("0123abcd", "4567abcd"))
    for file in (stale, fresh):
        file.write_bytes(b"half")
    os.utime(stale, (0, 0))
    write_file(path, FACTS, MEMBERS)
    assert left(tmp_path) == [fresh.name, path.name]


def test_files_are_as_readable_as_others(tmp_path: Path) -> None:
    path, plain = tmp_path / "model.qfuse", tmp_path / "plain"
    write_file(path, FACTS, MEMBERS)
    plain.write_bytes(b"")
    assert path.stat().st_mode == plain.stat().st_mode


def test_other_files_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "a.pt2").write_bytes(b"PK\x03\x04")
    assert not is_model_file(tmp_path / "a.pt2")
    assert not is_model_file(tmp_path / "missing")
    assert not is_model_file(tmp_path)


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelFileError, match="it is a pipe or a device") as error:
        open_file(tmp_path / "pipe")
    assert error.value.fix == "write it to a file first"
