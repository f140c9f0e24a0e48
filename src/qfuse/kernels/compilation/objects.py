"""Object files of the kernels in the cache, which later builds use again.

A build that failed or was stopped keeps what it had compiled, and a change of one source compiles
only the files that include it. An object file is found by a hash of all that it depends on: the
source with the headers of this folder that it includes, the flags, the compiler and torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

_FORMAT = 1
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_KEPT_SECONDS = 30 * 24 * 3600


@dataclass(frozen=True, slots=True)
class ObjectCache:
    """A folder of object files.

    Attributes:
        folder: Where they are; it is made when needed.
        sources: The root of the sources, to which includes are relative.
        compiler: Version line of the compiler.
    """

    folder: Path
    sources: Path
    compiler: str

    def path(self, source: Path, flags: Sequence[str]) -> Path:
        """Return where the object file of a source is, or will be.

        Args:
            source: A file below ``sources``.
            flags: What the compiler is told, without paths of folders.
        """
        texts = {
            path.relative_to(self.sources).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in self._read(source)
        }
        facts = [_FORMAT, texts, list(flags), self.compiler, torch.__version__, source.name]
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{digest[:32]}.o"

    def compiled(
        self, source: Path, flags: Sequence[str], compile_to: Callable[[Path], None]
    ) -> Path:
        """Return the object file of a source, compiled if there is none.

        Args:
            source: A file below ``sources``.
            flags: What the compiler is told, without paths of folders.
            compile_to: Compiles the source to a path; what it raises comes through.
        """
        path = self.path(source, flags)
        if path.exists():
            os.utime(path)
            return path
        self.folder.mkdir(parents=True, exist_ok=True)
        # Renamed when it is whole. Processes that compile the same file at once do not meet.
        new = path.with_suffix(f".{os.getpid()}.new")
        try:
            compile_to(new)
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
        return path

    def remove_old(self) -> None:
        """Remove what no build has used for a month."""
        for path in self.folder.glob("*"):
            if time.time() - path.stat().st_mtime > _KEPT_SECONDS:
                path.unlink(missing_ok=True)

    def _read(self, source: Path) -> list[Path]:
        """Return a source and the headers that it includes, and these include."""
        found = [source]
        for path in found:
            for name in _INCLUDE.findall(path.read_text(encoding="utf-8")):
                # Beside the file that includes it, or from the root.
                near = [folder / name for folder in (path.parent, self.sources)]
                header = next((p.resolve() for p in near if p.exists()), None)
                if header is not None and header not in found:
                    found.append(header)
        return sorted(found)
