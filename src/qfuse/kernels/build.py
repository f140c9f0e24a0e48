"""Compiles the C++ kernels into a cache, once per torch version, sources and compiler.

The cache is ``$QFUSE_CACHE_DIR/kernels``, by default below the user's cache folder: one folder per
key (sources, torch, flags, C++ ABI, machine) with libraries and their descriptions per compiler,
and the folder ``objects`` of :mod:`qfuse.kernels.compilation.objects`. There are several libraries,
see :mod:`qfuse.kernels.compilation.parts`, each built when it is asked for. A library whose
description or checksum does not match is rebuilt, and the reason is logged.

A wheel may ship libraries in the same form, in the folder ``prebuilt`` beside this file (made by
:func:`copy_library`, packed by ``hatch_build.py``). A matching one is taken before the cache.

``QFUSE_SANITIZE=address`` (or ``undefined``, or both with a comma) builds kernels that abort the
process at the first out-of-bounds access; ``make asan`` runs the kernel tests with it, with the
compiler's ``libasan.so`` in ``LD_PRELOAD``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import platformdirs
import torch

from qfuse.ir.compiler_limits import limit_behind
from qfuse.ir.cpp_library import FIX, own_cpp_library
from qfuse.ir.errors import CacheError
from qfuse.ir.files import parse_json
from qfuse.kernels.compilation.compiler import (
    KernelBuildError,
    KernelCompiler,
    build_seconds,
    run_compiler,
    sanitizer_flags,
)
from qfuse.kernels.compilation.objects import ObjectCache
from qfuse.kernels.compilation.parts import CORE, described, duration, part_of
from qfuse.kernels.compilation.scratch import scratch_folder
from qfuse.kernels.compilation.waiting import build_lock

_log = logging.getLogger(__name__)

_SOURCES = Path(__file__).with_name("csrc")
PREBUILT = Path(__file__).with_name("prebuilt")
_FORMAT = 3  # of the cache entries
_OBJECTS = "objects"

# No contraction to fused multiply-add, so that all instruction sets are bit-identical. No -march:
# the library runs on every machine of this architecture and dispatches at run time.
_FLAGS = (
    "-std=c++20", "-O2", "-fPIC", "-fopenmp", "-ffp-contract=off", "-Wno-psabi",
    "-fvisibility=hidden",
)  # fmt: skip
# Files with plain loops over memory; elsewhere -O3 only makes compilation slower.
_PLAIN_LOOPS = {
    "attention/attention.cpp": ("-O3",),
    "convolution/convolution_depthwise.cpp": ("-O3",),
    "convolution/convolution_w8a8.cpp": ("-O3",),
    "convolution/patches.cpp": ("-O3",),
    "linear/int8_operands.cpp": ("-O3",),
    "linear/linear_w8a8.cpp": ("-O3",),
    "linear/linear_a16.cpp": ("-O3",),
    "linear/group_operands.cpp": ("-O3",),
    "matmul/deep_sums.cpp": ("-O3",),
    "matmul/pack_right.cpp": ("-O3",),
}
# Those that take longest are compiled first, so that no core waits for one at the end.
_SLOW = {
    "quantized/real_avx512.cpp", "isa/avx2.cpp", "isa/portable.cpp", "register.cpp",
    "packages/chain.cpp", "isa/avx512.cpp", "isa/avx512_vnni.cpp", "tensors.cpp",
    "packages/run_package.cpp",
}  # fmt: skip
_AVX2_FLAGS = ("-mavx2", "-mfma")
_AVX512_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_X86_FLAGS = {
    "isa/avx2.cpp": _AVX2_FLAGS,
    "isa/avx_vnni.cpp": _AVX2_FLAGS,
    "isa/avx_vnni_evex.cpp": _AVX2_FLAGS,
    "isa/avx512.cpp": _AVX512_FLAGS,
    "isa/avx512_vnni.cpp": (*_AVX512_FLAGS, "-mavx512vnni"),
    "isa/amx.cpp": _AVX512_FLAGS,
    "isa/amx_emulated.cpp": (*_AVX512_FLAGS, "-mavx512vnni"),
    "quantized/real_avx512.cpp": _AVX512_FLAGS,
}
_LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch")

Say = Callable[[str], None] | None


@dataclass(frozen=True, slots=True)
class BuildEntry:
    """The description of a cached library.

    Attributes:
        key: Hash of the sources and the build environment.
        compiler: Version line of the compiler.
        sha256: Of the library's bytes.
    """

    key: str
    compiler: str
    sha256: str


def kernel_cache() -> Path:
    """Return the folder of the cache; it may not exist yet."""
    root = os.environ.get("QFUSE_CACHE_DIR")
    return (Path(root) if root else platformdirs.user_cache_path("qfuse")) / "kernels"


def read_description(library: Path) -> BuildEntry:
    """Read the description of a cached library.

    Raises:
        CacheError: It is missing or unreadable.
    """
    try:
        text = library.with_suffix(".json").read_text(encoding="utf-8")
        return BuildEntry(**parse_json(text))
    except (OSError, ValueError, TypeError) as error:
        raise CacheError(f"its description cannot be read ({error})") from error


def library_key() -> str:
    """Return the hash of the sources and of what decides the build, except for the compiler.

    Libraries of one key have the same functions, whatever compiler they are from.
    """
    return _key(_SOURCES)


def folder_name(key: str) -> str:
    """Return the name of the folder of the libraries of a key."""
    return key[:24]


def copy_library(library: Path, to: Path) -> Path:
    """Copy a cached library with its description into a folder of prebuilt libraries.

    The folder may hold several libraries, such as one per torch version.

    Args:
        library: The path from :func:`build`.
        to: The folder; it is created if it does not exist.

    Returns:
        The copy.

    Raises:
        KernelBuildError: The folder cannot be written to.
    """
    folder = to / library.parent.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        copied = Path(shutil.copy2(library, folder))
        shutil.copy2(library.with_suffix(".json"), folder)
    except (OSError, shutil.SameFileError) as error:
        raise KernelBuildError(
            f"the kernels cannot be copied: {error}",
            where=str(folder),
            fix="name a folder that can be written to",
        ) from error
    return copied


def build(  # noqa: PLR0913 - one keyword per choice
    compiler: KernelCompiler | None,
    part: str = CORE,
    *,
    ahead: Sequence[str] = (),
    sources: Path = _SOURCES,
    prebuilt: Path = PREBUILT,
    rebuild: bool = False,
    say: Say = None,
) -> tuple[Path, bool]:
    """Return a library built from ``sources``, compiling only if none is cached.

    Safe for concurrent processes: one compiles, the others wait for it.

    Args:
        compiler: The compiler; ``None`` uses a cached library from any compiler.
        part: Which library.
        ahead: Others that are built at the same time, if this one has to be compiled.
        sources: Folder of the C++ files.
        prebuilt: Folder of libraries that ship with the package.
        rebuild: Compile even if a library is cached.
        say: Called with how far the compiler is; without it, a warning says that it runs.

    Returns:
        The library's path, and whether it was compiled now.

    Raises:
        KernelBuildError: No compiler and no cached library, the compiler failed, or the cache
            folder cannot be used.
    """
    key = _key(sources)
    folder = kernel_cache() / folder_name(key)
    if not rebuild:
        # Without the lock: the cache may be read-only. A shipped library may be of any compiler.
        found = _cached(
            prebuilt / folder_name(key), key, part, None, level=logging.WARNING
        ) or _cached(folder, key, part, compiler, level=logging.DEBUG)
        if found is not None:
            return found, False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with build_lock(folder / "lock", folder.parent / _OBJECTS, seconds=build_seconds()):
            if not rebuild:
                found = _cached(folder, key, part, compiler, level=logging.WARNING)
                if found is not None:
                    return found, False
            if compiler is None:
                raise _no_compiler(part)
            missing = [
                name
                for name in ahead
                if name != part and not _cached(folder, key, name, compiler, level=logging.DEBUG)
            ]
            _compile(folder, key, compiler, sources, [part, *missing], say)
            return _library_path(folder, part, compiler), True
    except OSError as error:
        limit = limit_behind(error)
        raise KernelBuildError(
            f"the kernel cache cannot be used: {error}",
            where=str(folder),
            fix="point QFUSE_CACHE_DIR at a folder that can be written to"
            if limit is None
            else limit.fix,
        ) from error


def _no_compiler(part: str) -> KernelBuildError:
    what = f"the kernels for {part} are not built, and " if part else ""
    return KernelBuildError(
        f"{what}no C++ compiler was found",
        fix="install a C++20 compiler (g++ or clang++), or set CXX; qfuse doctor shows details",
    )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _files(sources: Path) -> list[Path]:
    return sorted(path for path in sources.rglob("*") if path.suffix in {".cpp", ".h"})


def _name(path: Path, sources: Path) -> str:
    return path.relative_to(sources).as_posix()


def _key(sources: Path) -> str:
    facts = {
        "format": _FORMAT,
        "sources": {_name(path, sources): _digest(path.read_bytes()) for path in _files(sources)},
        "torch": torch.__version__,
        "cxx11_abi": torch.compiled_with_cxx11_abi(),
        "machine": [sys.platform, platform.machine()],
        "flags": [_FLAGS, _PLAIN_LOOPS, _X86_FLAGS, _LIBRARIES, sanitizer_flags()],
    }
    return _digest(json.dumps(facts, sort_keys=True).encode())


def _stem(part: str) -> str:
    return f"qfuse_kernels_{part}" if part else "qfuse_kernels"


def _library_path(folder: Path, part: str, compiler: KernelCompiler) -> Path:
    # Not in the key: without a compiler, a library from any compiler will do.
    who = _digest(json.dumps(asdict(compiler)).encode())[:12]
    return folder / f"{_stem(part)}-{who}.so"


def _cached(
    folder: Path, key: str, part: str, compiler: KernelCompiler | None, *, level: int
) -> Path | None:
    candidates = (
        # Sorted, so that all processes take the same one.
        sorted(folder.glob(f"{_stem(part)}-*.so"))
        if compiler is None
        else [_library_path(folder, part, compiler)]
    )
    for library in candidates:
        if not library.exists():
            continue
        try:
            _validate(library, key)
        except CacheError as error:
            _log.log(level, "kernel library %s is not usable and is rebuilt: %s", library, error)
            continue
        return library
    return None


def _validate(library: Path, key: str) -> None:
    entry = read_description(library)
    if entry.key != key:
        raise CacheError("it was built from other sources or for another torch")
    # Loading a truncated library kills the process.
    if entry.sha256 != _digest(library.read_bytes()):
        raise CacheError("its bytes are not those that were written")


def _compile(
    folder: Path,
    key: str,
    compiler: KernelCompiler,
    sources: Path,
    parts: Sequence[str],
    say: Say,
) -> None:
    cache = ObjectCache(folder.parent / _OBJECTS, sources.resolve(), compiler.version)
    files = [
        path
        for path in _files(sources)
        if path.suffix == ".cpp" and part_of(_name(path, sources)) in parts
    ]
    files.sort(key=lambda path: _name(path, sources) not in _SLOW)
    what = "compiling qfuse's kernels (only once): %s: %d files, %s, with %s"
    level = logging.INFO if say else logging.WARNING
    _log.log(level, what, described(parts), len(files), duration(parts), compiler.version)
    objects: dict[str, list[Path]] = {part: [] for part in parts}
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        # Raises what a compiler raised.
        made = pool.map(partial(_object, cache, compiler), files)
        for count, (file, path) in enumerate(zip(files, made, strict=True), 1):
            objects[part_of(_name(file, sources))].append(path)
            if say is not None:
                say(f"compiling the kernels (only once): {count} of {len(files)} files")
    # The one that was asked for last: if that is there, the others are.
    for part in reversed(parts):
        _link(_library_path(folder, part, compiler), key, compiler, objects[part])
    cache.remove_old()


def _link(library: Path, key: str, compiler: KernelCompiler, objects: Sequence[Path]) -> None:
    # In the cache, since a rename is atomic within one file system only.
    with scratch_folder(".new-", library.parent) as temporary:
        new = Path(temporary, library.name)
        link = [*compiler.command, *_link_flags(), "-o", str(new), *map(str, objects), *_LIBRARIES]
        try:
            run_compiler(link)
        except KernelBuildError:
            for path in objects:
                path.unlink(missing_ok=True)
            raise
        own = own_cpp_library(new)
        if own is not None:
            who = compiler.command[0]
            raise KernelBuildError(f"the C++ compiler {who} does not work: {own}", fix=FIX)
        entry = BuildEntry(key, compiler.version, _digest(new.read_bytes()))
        described = new.with_suffix(".json")
        described.write_text(json.dumps(asdict(entry)), encoding="utf-8")
        # Each file is replaced atomically; between the two, the library fails its checksum.
        new.replace(library)
        described.replace(library.with_suffix(".json"))


def _object(cache: ObjectCache, compiler: KernelCompiler, source: Path) -> Path:
    # Imports setuptools, which only a build needs.
    from torch.utils.cpp_extension import include_paths  # noqa: PLC0415

    source = source.resolve()
    flags = [*compiler.command[1:], *_source_flags(source, cache.sources)]
    headers = [f"-I{cache.sources}", *(f"-isystem{path}" for path in include_paths())]
    command = [compiler.command[0], *flags, *headers, "-c", str(source), "-o"]
    return cache.compiled(source, flags, lambda to: run_compiler([*command, str(to)]))


def _source_flags(source: Path, sources: Path) -> list[str]:
    name = _name(source, sources)
    isa = _X86_FLAGS.get(name, ()) if platform.machine() in {"x86_64", "AMD64"} else ()
    # With the other ABI, symbols of libtorch that have strings in their signature do not link.
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    loops = _PLAIN_LOOPS.get(name, ())
    return [*_FLAGS, *loops, *isa, *sanitizer_flags(), abi]


def _link_flags() -> list[str]:
    from torch.utils.cpp_extension import library_paths  # noqa: PLC0415

    paths = [f"-L{path}" for path in library_paths()]
    return ["-shared", "-fopenmp", *sanitizer_flags(), *paths]
