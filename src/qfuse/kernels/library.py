"""Loads the compiled kernels into the process."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload

from qfuse.ir.errors import CacheError, OptionsError
from qfuse.kernels.build import (
    BuildEntry,
    Say,
    build,
    folder_name,
    library_key,
    read_description,
)
from qfuse.kernels.cat_ops import cat_channels
from qfuse.kernels.compilation.compiler import (
    KernelBuildError,
    find_kernel_compiler,
)
from qfuse.kernels.compilation.parts import PATHS, expected_parts
from qfuse.kernels.compilation.scratch import scratch_folder
from qfuse.kernels.convolution_ops import (
    convolution_depthwise_w8a8,
    convolution_depthwise_w8a8_quantized,
    convolution_w8a8,
    convolution_w8a8_grouped,
    convolution_w8a8_grouped_quantized,
    convolution_w8a8_quantized,
)
from qfuse.kernels.grouped_ops import (
    linear_w4a8,
    linear_w4a8_quantized,
    linear_w4a8_rows,
    linear_w8a8_grouped,
    linear_w8a8_grouped_quantized,
    linear_w8a8_grouped_rows,
)
from qfuse.kernels.image_activation import image_activation_quantized
from qfuse.kernels.matmul_ops import attention, matmul_a8a8, matmul_a8a8_quantized
from qfuse.kernels.op import KernelOp
from qfuse.kernels.ops import linear_w8a8, linear_w8a8_quantized, linear_w8a8_rows
from qfuse.kernels.paths import PathLoader
from qfuse.kernels.rowwise import ROWWISE_OPS
from qfuse.kernels.weight_only import linear_w4a16, linear_w8a16, linear_w16a32
from qfuse.kernels.weight_only_convolution import convolution_w4a16, convolution_w8a16

_log = logging.getLogger(__name__)

ISA_VARIABLE = "QFUSE_ISA"

OPS: tuple[KernelOp[Any], ...] = (
    linear_w8a8,
    linear_w8a8_quantized,
    linear_w8a8_rows,
    linear_w4a8,
    linear_w4a8_quantized,
    linear_w4a8_rows,
    linear_w8a8_grouped,
    linear_w8a8_grouped_quantized,
    linear_w8a8_grouped_rows,
    linear_w4a16,
    linear_w8a16,
    linear_w16a32,
    convolution_w8a8,
    convolution_w8a8_quantized,
    convolution_w8a8_grouped,
    convolution_w8a8_grouped_quantized,
    convolution_depthwise_w8a8,
    convolution_depthwise_w8a8_quantized,
    convolution_w4a16,
    convolution_w8a16,
    attention,
    cat_channels,
    image_activation_quantized,
    matmul_a8a8,
    matmul_a8a8_quantized,
    *ROWWISE_OPS,
)
"""The ops of the library."""


@dataclass(frozen=True, slots=True)
class KernelLibrary:
    """The state of the kernels in this process.

    Attributes:
        available: Whether the ops can be called.
        reason: Why they cannot; "" if they can.
        path: The loaded core; ``None`` if one had already been loaded by its path.
        compiled: Whether something was compiled now rather than found in the cache.
        instruction_sets: The paths that this processor supports, the best one last. Their libraries
            are loaded, and compiled, when they are needed.
        default: The one that is used; "" if none is.
    """

    available: bool
    reason: str = ""
    path: Path | None = None
    compiled: bool = False
    instruction_sets: tuple[str, ...] = ()
    default: str = ""

    def images(self) -> tuple[KernelImage, ...]:
        """Return the libraries of every path of the architecture as bytes, the core first.

        Those that are missing are compiled. Without a compiler they are left out, with a warning.

        Raises:
            CacheError: A file is gone or is another one, or the core was loaded by its path.
        """
        if self.path is None:
            raise CacheError("the kernels were loaded by their path, not by qfuse")
        return tuple(_image(path) for path in (self.path, *_LOADER.libraries_to_save()))


def _image(path: Path) -> KernelImage:
    entry = read_description(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CacheError(f"the kernels cannot be read: {error}") from error
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise CacheError("the file of the kernels is not the one that was loaded")
    return KernelImage(path.name, entry, data)


@dataclass(frozen=True, slots=True)
class KernelImage:
    """A kernel library outside the cache, such as in the file of a compiled model.

    Attributes:
        name: The name of its file, which says which compiler it is from.
        entry: Its description.
        data: Its bytes.
    """

    name: str
    entry: BuildEntry
    data: bytes = field(repr=False)


class _Loader:
    """Caches the outcome, because ops can be registered only once per process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._result: KernelLibrary | None = None
        self.paths = PathLoader()

    def load(self, say: Say) -> KernelLibrary:
        with self._lock:
            if self._result is None:
                self._result = _load(say)
            return self._result

    def load_images(self, images: Sequence[KernelImage]) -> KernelLibrary:
        with self._lock:
            if self._result is None or not self._result.available:
                self._result = _load_images(images)
            return self._result

    def libraries_to_save(self) -> list[Path]:
        try:
            return self.paths.every_library()
        except KernelBuildError as error:
            found = self.paths.found_libraries()
            missing = ", ".join(part for part in PATHS if part not in found)
            _log.warning("saved without the kernels for %s: %s", missing, error)
            return list(found.values())


_LOADER = _Loader()


def load(say: Say = None) -> KernelLibrary:
    """Load the kernels once per process, compiling them if they are not cached (about a minute).

    Only what this processor runs is compiled. The environment variable ``QFUSE_ISA`` names the
    instruction set to use instead of the best.

    Args:
        say: Called with how far the compiler is; without it, a warning says that it runs.

    Returns:
        The outcome, with the reason if the kernels are unavailable.

    Raises:
        OptionsError: ``QFUSE_ISA`` names an instruction set that this machine does not support.
        KernelBuildError: Its kernels are missing and cannot be built.
    """
    return _LOADER.load(say)


def load_images(images: Sequence[KernelImage]) -> KernelLibrary:
    """Load kernels that were saved, unless the process has kernels already.

    Args:
        images: What :meth:`KernelLibrary.images` returned, by this version's sources: see
            :func:`qfuse.kernels.build.library_key`.

    Raises:
        OSError: They cannot be written to a temporary folder, or cannot be loaded.
        OptionsError: ``QFUSE_ISA`` names an instruction set that this machine does not support.
        KernelBuildError: Its kernels are missing and cannot be built.
    """
    return _LOADER.load_images(images)


def build_every_path(say: Say = None) -> list[Path]:
    """Return the libraries of all instruction sets of this architecture but the core.

    Those that are missing are compiled. Otherwise each is when it is first used.

    Args:
        say: Called with how far the compiler is; without it, a warning says that it runs.

    Raises:
        KernelBuildError: One is missing and cannot be built.
    """
    return _LOADER.paths.every_library(say)


def c_declarations() -> dict[OpOverload, str]:
    """Return the C declarations of the functions of the ops, for AOTInductor.

    Empty if the process has no kernels. Code that calls the functions can be loaded only after the
    kernels, see :func:`load`.
    """
    if not is_loaded():
        return {}
    texts: dict[str, str] = torch.ops.qfuse.c_functions()
    return {op.overload: texts[op.name] for op in OPS}


@contextlib.contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """Context manager that makes all kernels of the process use one instruction set.

    Args:
        name: One of :attr:`KernelLibrary.instruction_sets`.

    Raises:
        OptionsError: It is not supported here, or the kernels are not loaded.
        KernelBuildError: Its kernels are missing and cannot be built.
    """
    library = load()
    before = torch.ops.qfuse.chosen_kernels() if library.available else ""
    _choose(library, name)
    try:
        yield
    finally:
        torch.ops.qfuse.choose_kernels(before)


def _choose(library: KernelLibrary, name: str, say: Say = None) -> bool:
    if name not in library.instruction_sets:
        raise OptionsError(
            f"no kernels for the instruction set {name!r} on this machine",
            fix=f"one of: {', '.join(library.instruction_sets) or library.reason}",
        )
    compiled = _LOADER.paths.load(name, say)
    torch.ops.qfuse.choose_kernels(name)
    return compiled


def _register(path: Path) -> None:
    torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]


def _is_registered() -> bool:
    return hasattr(torch.ops.qfuse, "linear_w8a8")


def is_loaded() -> bool:
    """Whether this process has the ops, and a path that runs them."""
    return _is_registered() and bool(torch.ops.qfuse.loaded_kernels())


def _load(say: Say) -> KernelLibrary:
    if _is_registered():
        # Loading two libraries that define the same ops aborts the process.
        try:
            _check_registered()
        except KernelBuildError as error:
            return _unavailable(error)
        return _loaded(None, compiled=False, say=say)
    try:
        compiler = find_kernel_compiler()
        ahead = expected_parts(torch.cpu.get_capabilities(), os.environ.get(ISA_VARIABLE, ""))
        path, compiled = build(compiler, ahead=ahead, say=say)
        try:
            _register(path)
        except OSError as error:
            # Intact, but built for a different system, such as another C library.
            _log.warning("kernel library %s cannot be loaded and is rebuilt: %s", path, error)
            path, compiled = build(compiler, ahead=ahead, rebuild=True, say=say)
            _register(path)
    except (KernelBuildError, OSError) as error:
        return _unavailable(error)
    return _loaded(path, compiled=compiled, say=say)


def _unavailable(error: Exception) -> KernelLibrary:
    # Log only the first line; the code that shows `reason` prints the fix.
    reason = str(error)
    _log.warning("no own kernels: %s", reason.partition("\n")[0])
    return KernelLibrary(available=False, reason=reason)


def _check_registered() -> None:
    """Refuse a core that was loaded by its path, unless paths of these sources fit to it."""
    file = Path(torch.ops.qfuse.kernel_file())
    try:
        same = read_description(file).key == library_key()
    except CacheError:
        same = False
    if not same:
        raise KernelBuildError(
            "the process has loaded kernels that are not those of this qfuse",
            where=str(file),
            fix="call qfuse.kernels.load() instead of torch.ops.load_library",
        )


def _load_images(images: Sequence[KernelImage]) -> KernelLibrary:
    # Until the process ends: the libraries may be saved again.
    stack = contextlib.ExitStack()
    place = stack.enter_context(scratch_folder("qfuse-kernels-"))
    atexit.register(stack.close)
    folder = place / folder_name(images[0].entry.key)
    folder.mkdir()
    for image in images:
        path = folder / image.name
        path.write_bytes(image.data)
        path.with_suffix(".json").write_text(json.dumps(asdict(image.entry)), encoding="utf-8")
    _LOADER.paths.shipped = place
    if _is_registered():
        return _load(None)
    _register(folder / images[0].name)
    return _loaded(folder / images[0].name, compiled=False, say=None)


def _loaded(path: Path | None, *, compiled: bool, say: Say) -> KernelLibrary:
    for op in OPS:
        # After loading: a fake is registered for the schema that the library defines.
        op.register_fake()
    # Compiled packages, also those from a cache, refer to the functions by name.
    torch.ops.qfuse.publish_c_functions()
    name = os.environ.get(ISA_VARIABLE)
    found = KernelLibrary(
        available=True,
        path=path,
        instruction_sets=tuple(torch.ops.qfuse.list_kernels()),
    )
    if name:
        more = _choose(found, name, say)
    else:
        try:
            more = _LOADER.paths.load_any(say)
        except KernelBuildError as error:
            return _unavailable(error)
    default = name or torch.ops.qfuse.loaded_kernels()[-1]
    return replace(found, compiled=compiled or more, default=default)


def result_memory() -> int:
    """Return the bytes that kernels keep for their next results (``docs/kernels.md``)."""
    return int(torch.ops.qfuse.result_memory()) if _is_registered() else 0


def release_result_memory() -> int:
    """Free the memory that kernels keep for their next results; return how many bytes it was."""
    return int(torch.ops.qfuse.release_result_memory()) if _is_registered() else 0
