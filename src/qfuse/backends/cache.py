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
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from qfuse.backends.key import constant_digest
from qfuse.ir.errors import CacheError

_FORMAT = 1
_LOCK_SECONDS = 1800
_MODEL, _EXTRAS, _MANIFEST = "model.pt2", "extras.safetensors", "manifest.json"

_logger = logging.getLogger("qfuse")


@dataclass(frozen=True, slots=True)
class Built:
    """The results of a compilation besides the package.

    Attributes:
        extras: Constants that the compiler created.
        isa: Vector ISA that the code requires, as named by the package.
        baked: Digests of the constants whose values were compiled into the code.
        conditions: Conditions on the sizes of a call, in the syntax of
            ``qfuse.ir.signature.size_expr``.
    """

    extras: dict[str, torch.Tensor]
    isa: str
    baked: dict[str, str]
    conditions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A verified package, and its requirements.

    Attributes:
        package: The file.
        extras: Constants that the compiler created.
        isa: Vector ISA that the code requires.
        conditions: Conditions on the sizes of a call.
    """

    package: Path
    extras: dict[str, torch.Tensor]
    isa: str
    conditions: tuple[str, ...]


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

    def build(self, key: str, make: Callable[[Path], Built]) -> CacheEntry:
        """Create an entry; ``make`` writes the package to the path that it receives.

        Raises:
            OSError: The folder cannot be written.
        """
        place = self._place(key)
        place.parent.mkdir(parents=True, exist_ok=True)
        # Within the cache, since a rename is atomic within one file system only.
        fresh = Path(tempfile.mkdtemp(prefix=f".{key[:8]}-", dir=self.folder))
        try:
            built = make(fresh / _MODEL)
            write_entry(fresh, key, built)
            if place.exists():
                # Processes that use the old entry keep their open files.
                shutil.rmtree(place, ignore_errors=True)
            fresh.replace(place)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        return CacheEntry(place / _MODEL, built.extras, built.isa, built.conditions)

    def lock(self, key: str) -> FileLock:
        """A lock across processes, so that a program is compiled once.

        Raises:
            OSError: The folder cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        return FileLock(self.folder / f"{key}.lock", timeout=_LOCK_SECONDS)

    def _runnable(self, entry: CacheEntry) -> CacheEntry:
        if not self.runs_here(entry.isa):
            raise CacheError(f"it was compiled for another CPU ({entry.isa})")
        return entry

    def _place(self, key: str) -> Path:
        return self.folder / key[:2] / key


def write_entry(folder: Path, key: str, built: Built) -> None:
    """Write extras and manifest next to the package in ``folder``."""
    save_file({k: v.contiguous() for k, v in built.extras.items()}, folder / _EXTRAS)
    manifest = {
        "format": _FORMAT,
        "key": key,
        "isa": built.isa,
        "baked": built.baked,
        "conditions": built.conditions,
        "sha256": {name: _file_digest(folder / name) for name in (_MODEL, _EXTRAS)},
    }
    text = json.dumps(manifest, indent=2, sort_keys=True)
    (folder / _MANIFEST).write_text(text, encoding="utf-8")


def read_entry(folder: Path, key: str, constants: Mapping[str, torch.Tensor]) -> CacheEntry:
    """Verify an entry and return it.

    Raises:
        CacheError: It is incomplete, modified, of another key, or was compiled with other values.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        _check(manifest, folder, key, constants)
        extras = load_file(folder / _EXTRAS)
        conditions = tuple(map(str, manifest["conditions"]))
        return CacheEntry(folder / _MODEL, extras, str(manifest["isa"]), conditions)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CacheError(f"it is unreadable ({type(error).__name__}: {error})") from error


def _check(
    manifest: dict[str, Any], folder: Path, key: str, constants: Mapping[str, torch.Tensor]
) -> None:
    if manifest["format"] != _FORMAT or manifest["key"] != key:
        raise CacheError("it has another format or program")
    for name in (_MODEL, _EXTRAS):
        if manifest["sha256"][name] != _file_digest(folder / name):
            raise CacheError(f"{name} is not the file that was written")
    for name, digest in manifest["baked"].items():
        if name not in constants or constant_digest(constants[name]) != digest:
            raise CacheError(f"constant {name} was compiled in with another value")


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
