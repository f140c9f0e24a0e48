"""Compiled parts of a program, and their runner."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

from qfuse.backends.blocks.wiring import Wiring
from qfuse.backends.cache import CompiledCode
from qfuse.backends.layout import Layout
from qfuse.ir.errors import BackendError
from qfuse.kernels.compilation.scratch import scratch_folder
from qfuse.kernels.library import is_loaded

_SIZE = re.compile(r"\bx\d+_\d+\b")


@dataclass(frozen=True, slots=True)
class CompiledChain:
    """The compiled parts of a program.

    Attributes:
        codes: What was compiled.
        wiring: How it is run.
        conditions: Conditions on the sizes of a call, of all parts together.
    """

    codes: tuple[CompiledCode, ...]
    wiring: Wiring
    conditions: tuple[str, ...]

    @property
    def extras(self) -> dict[str, torch.Tensor]:
        """Return the constants that the compiler created, by part and name."""
        return {
            extra_name(part, name): value
            for part, code in enumerate(self.codes)
            for name, value in code.extras.items()
        }


def extra_name(part: int, name: str) -> str:
    """Return the name of a constant that the compiler created for a part."""
    return f"{part}.{name}"


def check_package(code: CompiledCode) -> None:
    """Refuse a package that cannot be unpacked, such as a damaged one of the cache.

    Raises:
        BackendError: It is damaged, or does not have one library.
    """
    try:
        _library_of(_files(code))
    except (LookupError, zipfile.BadZipFile) as error:
        raise BackendError(f"a compiled package is damaged: {error}") from error


def joint_conditions(
    codes: Sequence[CompiledCode], sizes: Sequence[Mapping[str, str]]
) -> tuple[str, ...]:
    """Return the conditions of all parts, over the names of the sizes of the whole program.

    Raises:
        BackendError: A size is not one of the whole program.
    """
    found: dict[str, None] = {}
    for code, names in zip(codes, sizes, strict=True):
        for text in code.conditions:
            unknown = set(_SIZE.findall(text)) - set(names)
            if unknown:
                raise BackendError(f"a part has a condition on sizes of its own: {text}")
            found[_SIZE.sub(lambda match, names=names: names[match[0]], text)] = None  # type: ignore[misc]
    return tuple(found)


def load_chain(
    chain: CompiledChain, constants: Mapping[str, torch.Tensor], runners: int
) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """Load the parts, bind their constants without copying them, and return their entry.

    The entry checks nothing, as that of ``load_package``. The constants must outlive it.

    Args:
        chain: The compiled parts.
        constants: The constants of the whole program, and those of :attr:`CompiledChain.extras`.
        runners: How many threads may run the parts at the same time; others wait.

    Raises:
        BackendError: A part cannot be loaded.
    """
    if not is_loaded():
        raise BackendError(
            "the compiled blocks need qfuse's kernels, which are not loaded",
            fix="see qfuse doctor; QFUSE_BLOCKS=off compiles one package, which does not",
        )
    try:
        return _Chain(chain, constants, runners)
    except (RuntimeError, LookupError, OSError, zipfile.BadZipFile) as error:
        raise BackendError(
            f"the compiled blocks cannot be loaded: {error}",
            fix="check that the folder for temporary files has space, and that libraries can be "
            "loaded from it (noexec)",
        ) from error


class _Chain:
    """The loaded parts, which several threads run at the same time."""

    def __init__(
        self, chain: CompiledChain, constants: Mapping[str, torch.Tensor], runners: int
    ) -> None:
        wiring = chain.wiring
        self._runner = torch.classes.qfuse.PackageChain(wiring.inputs, wiring.size, runners)
        with scratch_folder("qfuse-blocks-") as folder:
            libraries = [
                _unpacked(code, folder / str(part)) for part, code in enumerate(chain.codes)
            ]
            for step in wiring.steps:
                # The same file for all occurrences: the system loads it once.
                library = str(libraries[step.part])
                self._runner.add(library, list(step.inputs), list(step.outputs))
        for index, step in enumerate(wiring.steps):
            bound = {
                name: constants[step.constants.get(name) or extra_name(step.part, name)]
                for name in self._runner.constant_names(index)
            }
            self._runner.bind(index, bound)
        for number, order in wiring.orders.items():
            self._runner.set_order(number, list(order))
        for number, name in wiring.held.items():
            value = constants[name]
            # Its readers were compiled for dense strides.
            self._runner.hold(number, Layout.of(value).place(value))
        self._runner.finish(list(wiring.results))
        self._number = self._runner.number()
        self._run = torch.ops.qfuse.run_package.default

    def __call__(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        results: list[torch.Tensor] = self._run(self._number, tensors)
        return results


def _unpacked(code: CompiledCode, folder: Path) -> Path:
    """Write the files of a package to a new folder; return its library.

    Raises:
        LookupError: The package does not have one library.
        BadZipFile: It is damaged.
    """
    folder.mkdir()
    files = _files(code)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder / _library_of(files)


def _library_of(files: Mapping[str, bytes]) -> str:
    libraries = [name for name in files if name.endswith(".so")]
    if len(libraries) != 1:
        raise LookupError(f"a package has {len(libraries)} libraries, not one")
    return libraries[0]


def _files(code: CompiledCode) -> dict[str, bytes]:
    """Return the files of a package that are needed to load it.

    Raises:
        BadZipFile: The package is damaged.
    """
    with zipfile.ZipFile(io.BytesIO(code.package)) as archive:
        # Without their folders: nothing is written elsewhere.
        paths = {name: PurePosixPath(name) for name in archive.namelist()}
        return {
            path.name: archive.read(name)
            for name, path in paths.items()
            if path.parent.name == "model" and path.suffix in {".so", ".json"}
        }
