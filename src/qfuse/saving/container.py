"""The file format: a header, a manifest as JSON, and members at multiples of a page.

::

    0    16 bytes   magic
    16    8 bytes   length of the manifest, little-endian
    24   32 bytes   SHA-256 of the manifest
    64              the manifest: format, requirements, and for each member offset, bytes, sha256
    ...             members; their offsets count from the first page after the manifest

Every byte is covered: the manifest by the header, the members by the manifest, and all bytes
between them are zero.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import mmap
import os
import secrets
import shutil
import stat
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from qfuse.ir.errors import ModelFileError
from qfuse.ir.files import replaceable_file
from qfuse.saving.tensors import Block

FORMAT = 1
SUFFIX = ".qfuse"

_MAGIC = b"\x89QFUSE MODEL\r\n\x1a\n"
_HEADER = struct.Struct("<16sQ32s")
_MANIFEST_AT = 64
_PAGE = 4096
_STALE_SECONDS = 60
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_AGAIN = "copy or save it again"

Chunks = Iterable[bytes | memoryview]


@dataclass(frozen=True, slots=True)
class Container:
    """An opened file.

    Attributes:
        manifest: Everything but the list of the members.
        block: The bytes of the file.
        name: The name of the file, for messages.
    """

    manifest: dict[str, Any]
    block: Block
    name: str
    _places: dict[str, tuple[int, int, str]]

    def __contains__(self, member: str) -> bool:
        return member in self._places

    @property
    def members(self) -> tuple[str, ...]:
        """Return the names of the members."""
        return tuple(self._places)

    def place(self, member: str) -> tuple[int, int]:
        """Return where a member begins, and its size in bytes."""
        begin, size, _ = self._places[member]
        return begin, size

    def read(self, member: str) -> bytes:
        """Return the bytes of a member."""
        begin, size = self.place(member)
        return bytes(memoryview(self.block)[begin : begin + size])

    def verify(self, members: Iterable[str] | None = None) -> None:
        """Compare the bytes of members, by default all, with the digests of the manifest.

        Raises:
            ModelFileError: They differ.
        """
        view = memoryview(self.block)
        for name in self._places if members is None else members:
            begin, size, digest = self._places[name]
            if hashlib.sha256(view[begin : begin + size]).hexdigest() != digest:
                raise ModelFileError(
                    f"it is damaged: the bytes of {name!r} are not those that were saved",
                    where=self.name,
                    fix=_AGAIN,
                )


def write_file(path: Path, manifest: Mapping[str, Any], members: Mapping[str, Chunks]) -> None:
    """Write a file in one piece: at any time there is the old one, or the whole new one.

    Args:
        path: The file; an existing one is replaced. Of a link, it is the one that it leads to.
        manifest: Facts as JSON.
        members: The content of each member, which is read twice.

    Raises:
        ModelFileError: It cannot be written. Nothing is left of it.
    """
    head, size = _head(manifest, members)
    place = replaceable_file(path, ModelFileError)
    try:
        _remove_stale(place)
        _check_space(place, size)
        # Beside the target, since a rename is atomic within one file system only.
        temporary = place.with_name(f".{place.name}.{secrets.token_hex(4)}.tmp")
        try:
            with _create(temporary) as file:
                for chunk in _layout(head, members):
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
                temporary.replace(place)
            _sync_folder(place.parent)
        except BaseException:
            # Also on KeyboardInterrupt: no half-written file stays behind.
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _write_error(error, path, size) from error


def write_bytes(manifest: Mapping[str, Any], members: Mapping[str, Chunks]) -> bytes:
    """Return the bytes of a file."""
    head, _ = _head(manifest, members)
    return b"".join(_layout(head, members))


def open_file(path: Path) -> Container:
    """Map a file into memory and check its header and manifest; members are not read.

    Raises:
        ModelFileError: There is no such file, or it is not one of this format.
    """
    try:
        # Before it is opened, which would wait for the other end of a pipe.
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise ModelFileError(
                "it is a pipe or a device, and a model is mapped into memory from its file",
                where=str(path),
                fix="write it to a file first",
            )
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            # Writes go to private copies of pages: a model may write its own buffers.
            block = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else b""
    except (OSError, ValueError) as error:
        raise ModelFileError(
            f"it cannot be read: {getattr(error, 'strerror', None) or error}",
            where=str(path),
            fix="give the path of a file that was saved with save()",
        ) from error
    return _opened(memoryview(block) if isinstance(block, bytes) else block, str(path))


def open_bytes(data: bytes, name: str) -> Container:
    """Return the container of :func:`write_bytes`.

    Raises:
        ModelFileError: The bytes are not of this format.
    """
    # Tensors need memory that is aligned, and that they may write.
    block = mmap.mmap(-1, max(len(data), 1))
    block[: len(data)] = data
    return _opened(block, name)


def is_model_file(path: Path) -> bool:
    """Whether a file begins like one of this format, of any version, or is named like one."""
    if path.suffix == SUFFIX:
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def _opened(block: Block, name: str) -> Container:
    view = memoryview(block)
    begin = bytes(view[: len(_MAGIC)])
    if len(view) < _MANIFEST_AT and _MAGIC.startswith(begin):
        raise ModelFileError(
            f"it is truncated: it has {len(view)} bytes" if begin else "it is empty",
            where=name,
            fix=_AGAIN,
        )
    if begin != _MAGIC:
        raise ModelFileError(
            "it is not a compiled model that qfuse saved",
            where=name,
            fix="give a file that was saved with save(); a program of torch.export is compiled "
            "with qfuse.compile",
        )
    _, length, digest = _HEADER.unpack_from(view)
    text = bytes(view[_MANIFEST_AT : _MANIFEST_AT + length])
    if hashlib.sha256(text).digest() != digest:
        raise ModelFileError(
            "it is damaged or truncated: its manifest is not the one that was saved",
            where=name,
            fix=_AGAIN,
        )
    manifest = json.loads(text)
    if manifest["format"] != FORMAT:
        raise ModelFileError(
            f"it has format {manifest['format']}, and this version of qfuse reads {FORMAT}",
            where=name,
            fix=f"use qfuse {manifest.get('qfuse', 'of the version that saved it')}, or save the "
            "model again",
        )
    first = _up(_MANIFEST_AT + length)
    places = {
        member: (first + part["offset"], part["bytes"], part["sha256"])
        for member, part in manifest.pop("members").items()
    }
    end = max((begin + size for begin, size, _ in places.values()), default=first)
    if len(view) != end:
        raise ModelFileError(
            f"it is {'truncated' if len(view) < end else 'too long'}: it has {len(view)} bytes of "
            f"{end}",
            where=name,
            fix=_AGAIN,
        )
    padding = [(_HEADER.size, _MANIFEST_AT), (_MANIFEST_AT + length, first)]
    padding += _gaps(first, places.values())
    if any(any(view[begin:end]) for begin, end in padding):
        raise ModelFileError(
            "it is damaged: bytes between its parts are not those that were saved",
            where=name,
            fix=_AGAIN,
        )
    return Container(manifest, block, name, places)


def _gaps(first: int, places: Iterable[tuple[int, int, str]]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of bytes before members, up to which they are padded."""
    end = first
    for begin, size, _ in sorted(places):
        yield end, begin
        end = begin + size


def _head(manifest: Mapping[str, Any], members: Mapping[str, Chunks]) -> tuple[bytes, int]:
    """Return header and manifest, and the size of the file."""
    parts, end = {}, 0
    for name, chunks in members.items():
        digest, size = hashlib.sha256(), 0
        for chunk in chunks:
            digest.update(chunk)
            size += len(chunk)
        offset = _up(end)
        parts[name] = {"offset": offset, "bytes": size, "sha256": digest.hexdigest()}
        end = offset + size
    facts = {"format": FORMAT, **manifest, "members": parts}
    text = json.dumps(facts, indent=1, allow_nan=False).encode()
    head = _HEADER.pack(_MAGIC, len(text), hashlib.sha256(text).digest())
    whole = head + bytes(_MANIFEST_AT - len(head)) + text
    return whole, _up(len(whole)) + end


def _layout(head: bytes, members: Mapping[str, Chunks]) -> Iterator[bytes | memoryview]:
    yield head
    end = len(head)
    for chunks in members.values():
        yield bytes(-end % _PAGE)
        end = _up(end)
        for chunk in chunks:
            yield chunk
            end += len(chunk)


def _up(position: int) -> int:
    return -(-position // _PAGE) * _PAGE


def _create(path: Path) -> BinaryIO:
    # `mkstemp` would make a file that only its owner can read.
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    # Tells it from one that a killed process left. Some network drives do not have locks.
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX)
    return os.fdopen(handle, "wb")


def _remove_stale(path: Path) -> None:
    """Remove what killed processes left beside ``path``."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.????????.tmp"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime < _STALE_SECONDS:
                continue
            with left.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()


def _check_space(path: Path, size: int) -> None:
    usage = shutil.disk_usage(path.parent)
    # A file system without a size, such as /proc, is not full: it takes no files at all.
    if usage.total and usage.free < size:
        raise OSError(errno.ENOSPC, "the disk is full")


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        # Some file systems cannot; the file itself is on disk.
        with suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)


def _write_error(error: OSError, path: Path, size: int) -> ModelFileError:
    if error.errno in _FULL:
        # A quota or a limit of the process is full, and not the disk.
        which = "" if error.errno == errno.ENOSPC else f" ({error.strerror})"
        return ModelFileError(
            f"the disk is full: the model takes {size / 1e6:.1f} MB{which}",
            where=str(path),
            fix="free space, or save to another disk; nothing was written",
        )
    # The folder exists: it is one of the system, which takes no files.
    why = "its folder takes no files" if error.errno == errno.ENOENT else error.strerror or error
    return ModelFileError(
        f"it cannot be written: {why}",
        where=str(path),
        fix="give a path in a folder that you may write to",
    )
