"""Which C++ standard library a library has, by the names in its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from qfuse.ir.cpp_library import own_cpp_library

STREAM = b"\0_ZNSt6localeC1Ev\0"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (STREAM + b"libstdc++.so.6\0", None),
        (b"\0answer\0", None),
        (b"\0libstdc++.so.6\0", None),
        (STREAM, "a copy of libstdc++"),
        (b"\0_ZNSt3__16localeC1Ev\0libc++.so.1\0", "libc++"),
        (b"\0_ZNSt3__16localeC1Ev\0libstdc++.so.6\0", "libc++"),
    ],
)
def test_own_cpp_library(tmp_path: Path, names: bytes, expected: str | None) -> None:
    library = tmp_path / "some.so"
    library.write_bytes(b"\x7fELF" + names)

    found = own_cpp_library(library)

    assert found is None if expected is None else found is not None and expected in found


def test_a_copy_without_names(tmp_path: Path) -> None:
    library = tmp_path / "stripped.so"
    library.write_bytes(b"\x7fELF\0trial\0")

    assert own_cpp_library(library) is None
    assert "a copy of libstdc++" in (own_cpp_library(library, has_streams=True) or "")


def test_a_library_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        own_cpp_library(tmp_path / "gone.so")
