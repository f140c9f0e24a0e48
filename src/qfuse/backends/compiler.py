"""Compile a program with AOTInductor, or find it in the cache."""

from __future__ import annotations

import io
import json
import logging
import platform
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import torch
from filelock import Timeout
from torch.fx import GraphModule

from qfuse.backends import _inductor_api
from qfuse.backends.cache import CompiledCode, PackageCache
from qfuse.backends.casts import rounds_by_casts
from qfuse.backends.key import constant_digest, package_digest, program_digest
from qfuse.backends.prepare import Program
from qfuse.backends.runner import BackendOptions, Progress
from qfuse.backends.toolchain import check_toolchain, isa_runs_here
from qfuse.ir.compiler_limits import limit_behind
from qfuse.ir.errors import BackendError, CacheError, InputError
from qfuse.ir.signature.size_expr import parse_size
from qfuse.kernels.compilation.scratch import scratch_folder
from qfuse.kernels.library import c_declarations
from qfuse.targets.storage import cache_directory

_logger = logging.getLogger("qfuse")

T = TypeVar("T")


def compile_program(
    program: Program,
    options: BackendOptions,
    tell: Progress,
    load: Callable[[Path, CompiledCode], T],
) -> T:
    """Compile ``program``, or find it in the cache, and return what ``load`` makes of it.

    Args:
        program: The program.
        options: Options of the compilation.
        tell: Called with a short description when a step begins.
        load: Called with the file of a package, which is not needed afterwards, and its content. A
            package of the cache for which it raises ``BackendError`` is compiled again.

    Raises:
        BackendError: There is no working C++ compiler, or the compilation failed.
    """
    return _Compilation(program, options, tell, load).run()


def for_people(program: Program, text: str) -> str:
    """Return a condition on sizes with the user's names of them."""
    for size in program.sizes.values():
        name = f"{program.names[size.position]}.shape[{size.axis}]"
        text = re.sub(rf"\b{size.name}\b", name, text)
    return text


class _Compilation(Generic[T]):
    """State of one call of :func:`compile_program`."""

    def __init__(
        self,
        program: Program,
        options: BackendOptions,
        tell: Progress,
        load: Callable[[Path, CompiledCode], T],
    ) -> None:
        self._program = program
        self._options = options
        self._tell = tell
        self._load = load
        self._folder = options.cache_folder or cache_directory() / "aoti"
        self._code: CompiledCode | None = None

    def run(self) -> T:
        try:
            if self._options.cache:
                return self._cached()
        except (CacheError, OSError, Timeout) as error:
            _logger.warning("compiling without the cache in %s: %s", self._folder, error)
        try:
            return self._uncached()
        except OSError as error:
            limit = limit_behind(error)
            raise BackendError(
                f"files for the compiler cannot be written: {error}",
                fix="free space in the folder for temporary files, or set TMPDIR to another one"
                if limit is None
                else limit.fix,
            ) from error

    def _cached(self) -> T:
        cache = PackageCache(self._folder, runs_here=isa_runs_here)
        key = program_digest(self._program, self._facts())
        # An invalid entry is logged once: by the second lookup, under the lock.
        found = self._found(cache, key, level=logging.DEBUG)
        if found is not None:
            return found
        with cache.lock(key):
            # Another process may have built the entry while this one waited.
            found = self._found(cache, key, level=logging.WARNING)
            if found is not None:
                return found
            entry = cache.store(key, self._built())
            return self._load(entry.package, entry.code)

    def _uncached(self) -> T:
        code = self._built()
        with scratch_folder("qfuse-package-") as folder:
            package = Path(folder, "model.pt2")
            package.write_bytes(code.package)
            # The loader unpacks to its own folder, so the file may be deleted.
            return self._load(package, code)

    def _found(self, cache: PackageCache, key: str, *, level: int) -> T | None:
        entry = cache.find(key, self._program.constants, level=level)
        if entry is None:
            return None
        self._tell("loading the compiled package from the cache")
        try:
            return self._load(entry.package, entry.code)
        except BackendError as error:
            _logger.log(level, "cache entry %s is rebuilt: %s", entry.package.parent, error)
            return None

    def _built(self) -> CompiledCode:
        """Compile, once: a cache that cannot be written does not make it run again."""
        if self._code is None:
            self._code = self._build()
        return self._code

    def _build(self) -> CompiledCode:
        self._tell("checking the C++ compiler")
        patches = {
            **check_toolchain(self._folder),
            **_called_directly(self._program.module),
            # It also rounds after every op in float16 and bfloat16, so only where it matters.
            "emulate_precision_casts": rounds_by_casts(self._program),
            **self._options.inductor,
        }
        self._tell("compiling with AOTInductor (C++)")
        program = self._program
        ranges = {symbol: (size.low, size.high) for symbol, size in program.sizes.items()}
        package, used, found = _inductor_api.compile_package(
            program.module, program.examples, patches, ranges
        )
        conditions = (*map(self._renamed, found), *self._not_empty())
        for text in conditions:
            self._check_condition(text)
        ours = program.constants
        return CompiledCode(
            package,
            extras={name: value for name, value in used.items() if name not in ours},
            isa=_isa_of(package),
            # A value that was compiled into the code is not in the key if it is large, and is
            # checked when the entry is read.
            baked={name: constant_digest(c) for name, c in ours.items() if name not in used},
            conditions=conditions,
        )

    def _check_condition(self, text: str) -> None:
        try:
            parse_size(text)
        except InputError as error:
            raise BackendError(
                f"compiled code would be correct only if {for_people(self._program, text)}",
                fix="declare narrower dynamic_shapes, or use static ones",
            ) from error

    def _not_empty(self) -> list[str]:
        """Return conditions that exclude empty axes: dividing by size zero kills the process."""
        return [f"{size.name} >= 1" for size in self._program.sizes.values() if size.low < 1]

    def _renamed(self, condition: str) -> str:
        """Return a condition over canonical names, which are the same in later captures."""
        for symbol, size in self._program.sizes.items():
            condition = re.sub(rf"\b{re.escape(symbol)}\b", size.name, condition)
        return condition

    def _facts(self) -> dict[str, str]:
        """Return everything besides the program that determines its compilation."""
        return {
            "torch": torch.__version__,
            "machine": f"{sys.platform} {platform.machine()}",
            "target": self._options.fingerprint,
            "kernels": self._options.kernels,
            "qfuse": package_digest(),
            "inductor": _inductor_api.config_digest(),
            "options": repr(sorted(self._options.inductor.items())),
        }


def _called_directly(module: GraphModule) -> dict[str, object]:
    """Return the option to call the kernels of a graph as C functions, not through a dispatcher."""
    graphs = [m.graph for m in module.modules() if isinstance(m, GraphModule)]
    used = {node.target for graph in graphs for node in graph.nodes}
    declarations = {op: text for op, text in c_declarations().items() if op in used}
    return _inductor_api.called_directly(declarations)


def _isa_of(package: bytes) -> str:
    """Return the vector ISA that a package requires."""
    with zipfile.ZipFile(io.BytesIO(package)) as archive:
        for name in archive.namelist():
            if name.endswith("wrapper_metadata.json"):
                return str(json.loads(archive.read(name)).get("AOTI_CPU_ISA", ""))
    return ""
