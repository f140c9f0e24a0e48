"""Compile a graph with AOTInductor, or load it from the cache."""

from __future__ import annotations

import json
import logging
import platform
import re
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from filelock import Timeout
from torch.fx import GraphModule

from qfuse.backends import _inductor_api
from qfuse.backends.aoti import AotiRunner
from qfuse.backends.cache import Built, CacheEntry, PackageCache
from qfuse.backends.eager import run_eagerly
from qfuse.backends.key import constant_digest, package_digest, program_digest
from qfuse.backends.prepare import Program, prepare
from qfuse.backends.runner import BackendOptions, Progress
from qfuse.backends.toolchain import check_toolchain, isa_runs_here
from qfuse.ir.errors import BackendError, CacheError, InputError
from qfuse.ir.events import Noted
from qfuse.ir.graph.stage_graph import LoweredGraph
from qfuse.ir.signature.size_expr import SizeFunction, parse_size
from qfuse.kernels.library import c_declarations
from qfuse.targets.storage import cache_directory

_logger = logging.getLogger("qfuse")


def compile_aoti(
    lowered: LoweredGraph, options: BackendOptions, progress: Progress | None = None
) -> AotiRunner:
    """Compile ``lowered``, or load it from the cache.

    Raises:
        BackendError: There is no working C++ compiler, or the compilation failed.
    """
    return _Compilation(lowered, options, progress or _ignore).runner()


class _Compilation:
    """State of one call of :func:`compile_aoti`."""

    def __init__(self, lowered: LoweredGraph, options: BackendOptions, tell: Progress) -> None:
        tell("preparing the graph for AOTInductor")
        self._lowered = lowered
        self._program: Program = prepare(lowered)
        self._options = options
        self._tell = tell
        self._folder = options.cache_folder or cache_directory() / "aoti"

    def runner(self) -> AotiRunner:
        try:
            if self._options.cache:
                return self._cached()
        except (CacheError, OSError, Timeout) as error:
            _logger.warning("compiling without the cache in %s: %s", self._folder, error)
        with tempfile.TemporaryDirectory(prefix="qfuse-package-") as folder:
            package = Path(folder, "model.pt2")
            built = self._build(package)
            # The loader unpacks to its own folder, so the file may be deleted.
            return self._loaded(CacheEntry(package, built.extras, built.isa, built.conditions))

    def _cached(self) -> AotiRunner:
        cache = PackageCache(self._folder, runs_here=isa_runs_here)
        key = program_digest(self._program, self._facts())
        # An invalid entry is logged once: by the second lookup, under the lock.
        runner = self._found(cache, key, level=logging.DEBUG)
        if runner is not None:
            return runner
        with cache.lock(key):
            # Another process may have built the entry while this one waited.
            runner = self._found(cache, key, level=logging.WARNING)
            return runner or self._loaded(cache.build(key, self._build))

    def _found(self, cache: PackageCache, key: str, *, level: int) -> AotiRunner | None:
        entry = cache.find(key, self._program.constants, level=level)
        if entry is None:
            return None
        self._tell("loading the compiled package from the cache")
        try:
            return self._loaded(entry)
        except BackendError as error:
            _logger.log(level, "cache entry %s is rebuilt: %s", entry.package.parent, error)
            return None

    def _loaded(self, entry: CacheEntry) -> AotiRunner:
        constants = {**self._program.constants, **entry.extras}
        try:
            run = _inductor_api.load_package(entry.package, constants, self._options.runners)
        except (RuntimeError, KeyError) as error:
            raise BackendError(
                f"the compiled package cannot be loaded: {error}",
                fix="check that libraries can be loaded from the temporary folder (noexec)",
            ) from error
        conditions = [self._condition(text) for text in entry.conditions]
        # The eager runner serves the sizes for which the compiled code is wrong.
        return AotiRunner(self._program, run, constants, conditions, run_eagerly(self._lowered))

    def _condition(self, text: str) -> SizeFunction:
        words = self._for_people(text)
        try:
            holds = parse_size(text)
        except InputError as error:
            raise BackendError(
                f"compiled code would be correct only if {words}",
                fix="declare narrower dynamic_shapes, or use static ones",
            ) from error
        note = f"compiled code is used if {words}; calls of other sizes run op by op"
        self._lowered.log.add(Noted("backends", note, warn=True))
        return holds

    def _for_people(self, text: str) -> str:
        """Return a condition with the user's names of the sizes."""
        for size in self._program.sizes.values():
            name = f"{self._program.names[size.position]}.shape[{size.axis}]"
            text = re.sub(rf"\b{size.name}\b", name, text)
        return text

    def _build(self, package: Path) -> Built:
        self._tell("checking the C++ compiler")
        patches = {
            **check_toolchain(self._folder),
            **_called_directly(self._program.module),
            **self._options.inductor,
        }
        self._tell("compiling with AOTInductor (C++)")
        program = self._program
        ranges = {symbol: (size.low, size.high) for symbol, size in program.sizes.items()}
        used, conditions = _inductor_api.compile_package(
            program.module, program.examples, package, patches, ranges
        )
        ours = program.constants
        return Built(
            extras={name: value for name, value in used.items() if name not in ours},
            isa=_isa_of(package),
            # A value that was compiled into the code is not in the key if it is large, and is
            # checked when the entry is read.
            baked={name: constant_digest(c) for name, c in ours.items() if name not in used},
            conditions=(*map(self._renamed, conditions), *self._not_empty()),
        )

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


def _isa_of(package: Path) -> str:
    """Return the vector ISA that a package requires."""
    with zipfile.ZipFile(package) as archive:
        for name in archive.namelist():
            if name.endswith("wrapper_metadata.json"):
                return str(json.loads(archive.read(name)).get("AOTI_CPU_ISA", ""))
    return ""


def _ignore(_text: str) -> None:
    """Ignore progress messages."""
