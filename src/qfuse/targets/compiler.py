"""Finds the C++ compiler that Inductor would use, without importing Inductor."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from qfuse.ir.compiler_limits import limit_behind
from qfuse.ir.cpp_library import FIX, own_cpp_library

_VERSION_SECONDS = 10
_TRIAL_SECONDS = 60
_TRIAL_SOURCE = """\
#include <omp.h>
#include <sstream>
#include <vector>
extern "C" int trial(int n) {
  std::vector<int> v(n);
  #pragma omp parallel for
  for (int i = 0; i < n; ++i) v[i] = omp_get_thread_num();
  std::ostringstream text;
  for (int i : v) text << i;
  return static_cast<int>(text.str().size());
}
"""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler.

    Attributes:
        path: The executable.
        version: First line of what ``--version`` prints.
    """

    path: str
    version: str

    @property
    def number(self) -> str:
        """The version number alone, such as ``12.2.0``; "" if it cannot be parsed."""
        numbers = re.findall(r"\d+\.\d+(?:\.\d+)?", self.version)
        return numbers[-1] if numbers else ""


def find_compiler() -> Compiler | None:
    """Return the first compiler that Inductor would accept, or ``None``.

    Inductor walks ``torch._inductor.config.cpp.cxx``, by default ``$CXX`` or ``g++`` (``clang++``
    on macOS). Its other default, downloading one from conda, is off unless enabled and is ignored
    here, because a compiler that is not installed is not a property of this machine.
    """
    from qfuse.targets import _torch_api  # noqa: PLC0415 - plans are compared without torch

    default = (os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++"),)
    for name in _torch_api.inductor_compilers() or default:
        path = shutil.which(name) if name else None
        if path is None:
            continue
        version = _version_line(path, Path(path).stat().st_mtime_ns)
        if version is not None:
            return Compiler(path, version)
    return None


# Safe to cache: the same file (path and modification time) always prints the same line.
@functools.lru_cache(maxsize=8)
def _version_line(path: str, _changed_ns: int) -> str | None:
    try:
        done = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            check=True,
            timeout=_VERSION_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.splitlines()
    return lines[0].strip() if lines else ""


@dataclass(frozen=True, slots=True)
class CompilerFault:
    """Why a compiler does not work.

    Attributes:
        what: What it said, or what ended it.
        fix: What to do; "" if another compiler is needed.
    """

    what: str
    fix: str = ""


def try_compiler(compiler: Compiler) -> CompilerFault | None:
    """Compile a small OpenMP library; return ``None`` on success, else what was wrong.

    A compiler without its standard library or without OpenMP still answers ``--version``, and one
    that links another standard library than torch's makes libraries that end the process.
    """
    with tempfile.TemporaryDirectory(prefix="qfuse-doctor-") as folder:
        source = Path(folder, "trial.cpp")
        source.write_text(_TRIAL_SOURCE, encoding="utf-8")
        library = source.with_suffix(".so")
        flags = ["-shared", "-fPIC", "-O1", "-fopenmp", "-std=c++17"]
        command = [compiler.path, *flags, "-o", str(library), str(source)]
        try:
            subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=_TRIAL_SECONDS
            )
            own = own_cpp_library(library, has_streams=True)
        except subprocess.CalledProcessError as error:
            limit = limit_behind(error)
            if limit is not None:
                return CompilerFault(limit.what, limit.fix)
            lines = [line for line in error.stderr.splitlines() if line.strip()]
            # The first lines may only say in which file and function the error is.
            first = "".join(lines[:1]) or "failed"
            return CompilerFault(next((line for line in lines if "error" in line), first))
        except (OSError, subprocess.SubprocessError) as error:
            return CompilerFault(str(error))
    return CompilerFault(own, FIX) if own else None


def python_headers() -> Path | None:
    """Return the folder of the interpreter's ``Python.h``, or ``None`` if it is missing."""
    folder = Path(sysconfig.get_path("include"))
    return folder if (folder / "Python.h").is_file() else None
