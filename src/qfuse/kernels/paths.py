"""Loads the libraries of instruction-set paths into the core, when they are needed.

The core says which those are: see ``csrc/isa/select.cpp``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from qfuse.kernels.build import PREBUILT, Say, build
from qfuse.kernels.compilation.compiler import KernelBuildError, find_kernel_compiler
from qfuse.kernels.compilation.parts import PATHS

_log = logging.getLogger(__name__)


class PathLoader:
    """Loads paths, and knows where their libraries were found."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.shipped = PREBUILT
        """A folder of libraries that are taken before those of the cache."""

    def load(self, name: str = "", say: Say = None) -> bool:
        """Load what the path ``name`` needs, or the best path of this processor.

        Args:
            name: A path that this processor supports; "" stands for the best one.
            say: Called with how far the compiler is.

        Returns:
            Whether something was compiled.

        Raises:
            KernelBuildError: A library is missing and cannot be built, or not loaded.
        """
        with self._lock:
            missing = torch.ops.qfuse.missing_kernels(name)
            made = [self._load(part, missing, say) for part in missing]
        return any(made)

    def load_any(self, say: Say = None) -> bool:
        """Load the best path; if its libraries are missing and cannot be built, the next best one.

        Returns:
            Whether something was compiled.

        Raises:
            KernelBuildError: There is none, with the reason for the best one.
        """
        try:
            return self.load(say=say)
        except KernelBuildError as error:
            for name in reversed(torch.ops.qfuse.list_kernels()):
                if self._find(name):
                    what = "the kernels for %s are used, which are slower: %s"
                    _log.warning(what, name, str(error))
                    return False
            raise

    def every_library(self, say: Say = None) -> list[Path]:
        """Return the libraries of all paths of this architecture, compiling those that are missing.

        Raises:
            KernelBuildError: One is missing and cannot be built.
        """
        with self._lock:
            return [self._build(part, PATHS, say)[0] for part in PATHS]

    def found_libraries(self) -> dict[str, Path]:
        """Return the libraries of paths that there are, by name."""
        found = {}
        for part in PATHS:
            try:
                found[part] = self._built(part)
            except KernelBuildError as error:
                _log.debug("%s", error)
        return found

    def _load(self, part: str, ahead: Sequence[str], say: Say) -> bool:
        path, compiled = self._build(part, ahead, say)
        try:
            _load_library(part, path)
        except KernelBuildError as error:
            # Intact, but built for a different system, such as another C library.
            _log.warning("kernel library %s is rebuilt: %s", path, error.what)
            path, compiled = self._build(part, (), say, rebuild=True)
            _load_library(part, path)
        return compiled

    def _build(
        self, part: str, ahead: Sequence[str], say: Say, *, rebuild: bool = False
    ) -> tuple[Path, bool]:
        return build(
            find_kernel_compiler(), part, ahead=ahead, prebuilt=self.shipped, rebuild=rebuild,
            say=say,
        )  # fmt: skip

    def _find(self, name: str) -> bool:
        """Load a path without compiling; return whether that was possible."""
        try:
            for part in torch.ops.qfuse.missing_kernels(name):
                _load_library(part, self._built(part))
        except KernelBuildError as error:
            _log.debug("%s", error)
            return False
        return True

    def _built(self, part: str) -> Path:
        """Return the library of a path that was compiled before, or was shipped."""
        return build(None, part, prebuilt=self.shipped)[0]


def _load_library(part: str, path: Path) -> None:
    try:
        torch.ops.qfuse.load_kernels(part, str(path))
    except RuntimeError as error:
        raise KernelBuildError(
            f"the kernels for {part} cannot be loaded: {error}",
            where=str(path),
            fix="check that libraries can be loaded from its folder (noexec)",
        ) from error
