"""The on-disk cache of compiled packages: written atomically, verified before loading.

An entry is a folder named by its key, with ``model.pt2``, the constants that the compiler created
(``extras.safetensors``) and ``manifest.json``, which is written first; the whole folder is then
moved into place. A truncated library, or one for another CPU, would kill the process when it is
loaded or run, so an entry that does not match its manifest bit for bit is rebuilt.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from qfuse.backends.key import constant_digest
from qfuse.ir.errors import CacheError
from qfuse.ir.files import parse_json
from qfuse.ir.locks import locked
from qfuse.kernels.compilation.scratch import scratch_folder

_FORMAT = 1
_LOCK_SECONDS = 1800
_MODEL, _EXTRAS, _MANIFEST = "model.pt2", "extras.safetensors", "manifest.json"

_logger = logging.getLogger("qfuse")


@dataclass(frozen=True, slots=True)
class CompiledCode:
    """The results of a compilation.

    Attributes:
        package: The content of the ``.pt2`` file.
        extras: Constants that the compiler created.
        isa: Vector ISA that the code requires, as named by the package.
        baked: Digests of the constants whose values were compiled into the code.
        conditions: Conditions on the sizes of a call, in the syntax of
            ``qfuse.ir.signature.size_expr``.
    """

    package: bytes = field(repr=False)
    extras: dict[str, torch.Tensor]
    isa: str
    baked: dict[str, str]
    conditions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A verified entry of the cache.

    Attributes:
        package: The file.
        code: Its content, and what it requires.
    """

    package: Path
    code: CompiledCode


@dataclass(frozen=True, slots=True)
class PackageCache:
    """A cache in one folder.

    Attributes:
        folder: The folder of the entries.
        runs_here: Whether code for an ISA runs on this machine.
    """

    folder: Path
    runs_here: Callable[[str], bool]

    def find(
        self, key: str, constants: Mapping[str, torch.Tensor], *, level: int = logging.WARNING
    ) -> CacheEntry | None:
        """Return a valid entry, or ``None``; an invalid one is logged at ``level``."""
        place = self._place(key)
        if not place.exists():
            return None
        try:
            return self._runnable(read_entry(place, key, constants))
        except CacheError as error:
            _logger.log(level, "cache entry %s is rebuilt: %s", place, error.what)
            return None

    def store(self, key: str, code: CompiledCode) -> CacheEntry:
        """Create an entry.

        Raises:
            OSError: The folder cannot be written, or its disk is full.
        """
        place = self._place(key)
        place.parent.mkdir(parents=True, exist_ok=True)
        # Within the cache, since a rename is atomic within one file system only.
        with scratch_folder(".new-", self.folder) as fresh:
            write_entry(fresh, key, code)
            if place.exists():
                # Processes that use the old entry keep their open files.
                shutil.rmtree(place, ignore_errors=True)
            fresh.replace(place)
        return CacheEntry(place / _MODEL, code)

    def lock(self, key: str) -> AbstractContextManager[None]:
        """A lock across processes, so that a program is compiled once.

        Raises:
            OSError: The folder cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        return locked(self.folder / f"{key}.lock", _LOCK_SECONDS)

    def _runnable(self, entry: CacheEntry) -> CacheEntry:
        if not self.runs_here(entry.code.isa):
            raise CacheError(f"it was compiled for another CPU ({entry.code.isa})")
        return entry

    def _place(self, key: str) -> Path:
        return self.folder / key[:2] / key


def write_entry(folder: Path, key: str, code: CompiledCode) -> None:
    """Write package, extras and manifest to ``folder``.

    Raises:
        OSError: The folder cannot be written, or its disk is full.
    """
    files = {
        _MODEL: code.package,
        _EXTRAS: save({k: v.contiguous() for k, v in code.extras.items()}),
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    manifest = {
        "format": _FORMAT,
        "key": key,
        "isa": code.isa,
        "baked": code.baked,
        "conditions": code.conditions,
        "sha256": {name: _digest(data) for name, data in files.items()},
    }
    text = json.dumps(manifest, indent=2, sort_keys=True)
    (folder / _MANIFEST).write_text(text, encoding="utf-8")


def read_entry(folder: Path, key: str, constants: Mapping[str, torch.Tensor]) -> CacheEntry:
    """Verify an entry and return it.

    Raises:
        CacheError: It is incomplete, modified, of another key, or was compiled with other values.
    """
    try:
        manifest: dict[str, Any] = parse_json((folder / _MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != _FORMAT or manifest["key"] != key:
            raise CacheError("it has another format or program")
        package, extras = (_read(folder, name, manifest) for name in (_MODEL, _EXTRAS))
        baked = {str(name): str(digest) for name, digest in manifest["baked"].items()}
        _check_baked(baked, constants)
        conditions = tuple(map(str, manifest["conditions"]))
        code = CompiledCode(package, load(extras), str(manifest["isa"]), baked, conditions)
        return CacheEntry(folder / _MODEL, code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CacheError(f"it is unreadable ({type(error).__name__}: {error})") from error


def _read(folder: Path, name: str, manifest: dict[str, Any]) -> bytes:
    data = (folder / name).read_bytes()
    if manifest["sha256"][name] != _digest(data):
        raise CacheError(f"{name} is not the file that was written")
    return data


def _check_baked(baked: Mapping[str, str], constants: Mapping[str, torch.Tensor]) -> None:
    for name, digest in baked.items():
        if name not in constants or constant_digest(constants[name]) != digest:
            raise CacheError(f"constant {name} was compiled in with another value")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
