"""The C++ compiler of the kernels: which one, its sanitizers, and what it says when it fails."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass

from qfuse.ir.compiler_limits import limit_behind
from qfuse.ir.errors import OptionsError, QfuseError

_log = logging.getLogger(__name__)

_VERSION_SECONDS = 10
# The largest file takes more than a minute of CPU time on a fast core, and the machine may be busy
# or emulated: this only ends a compiler that hangs.
_BUILD_SECONDS = 1800
_SANITIZED_BUILD_SECONDS = 7200  # instrumentation makes compilation many times slower

SANITIZE_VARIABLE = "QFUSE_SANITIZE"
_SANITIZERS = ("address", "undefined")
# Not vptr: torch's classes lack the type information that it needs.
_SANITIZED_FLAGS = ("-g1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all")


class KernelBuildError(QfuseError):
    """The kernels could not be compiled, or their cache could not be used."""


@dataclass(frozen=True, slots=True)
class KernelCompiler:
    """A C++ compiler.

    Attributes:
        command: The executable and its fixed arguments.
        version: First line of what ``--version`` prints.
    """

    command: tuple[str, ...]
    version: str


def find_kernel_compiler() -> KernelCompiler | None:
    """Return the compiler that Inductor would use: ``$CXX``, else g++ or clang++."""
    named = os.environ.get("CXX")
    for command in [shlex.split(named)] if named else [["g++"], ["clang++"]]:
        path = shutil.which(command[0]) if command else None
        version = _version_line(path) if path else None
        if path and version is not None:
            return KernelCompiler((path, *command[1:]), version)
    return None


def sanitizer_flags() -> tuple[str, ...]:
    """Return the flags that ``QFUSE_SANITIZE`` asks for.

    Raises:
        OptionsError: It names an unknown sanitizer.
    """
    names = os.environ.get(SANITIZE_VARIABLE, "")
    if not names:
        return ()
    for name in names.split(","):
        if name not in _SANITIZERS:
            raise OptionsError(
                f"{SANITIZE_VARIABLE}={names!r} has an unknown sanitizer {name!r}",
                fix=f"one of {', '.join(_SANITIZERS)}, or both with a comma between them",
            )
    return (f"-fsanitize={names}", "-fno-sanitize=vptr", *_SANITIZED_FLAGS)


def build_seconds() -> int:
    """Return how long one command may take."""
    return _SANITIZED_BUILD_SECONDS if sanitizer_flags() else _BUILD_SECONDS


def run_compiler(command: list[str]) -> None:
    """Run a command of the compiler.

    Raises:
        KernelBuildError: It fails, with the first error that it printed, or takes too long.
    """
    try:
        subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=build_seconds(),
            stdin=subprocess.DEVNULL, env=_compiler_environment(),
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        _log.debug("%s\n%s", shlex.join(command), error.stderr)
        limit = limit_behind(error)
        if limit is not None:
            raise KernelBuildError(
                f"the kernels could not be compiled: {limit.what}", fix=limit.fix
            ) from error
        lines = [line for line in error.stderr.splitlines() if "error" in line]
        raise KernelBuildError(
            f"the C++ compiler failed: {lines[0] if lines else error}",
            where=shlex.join(command),
            fix="run the command above to see everything that it says",
        ) from error
    except subprocess.SubprocessError as error:
        raise KernelBuildError(
            f"the C++ compiler did not finish: {error}",
            fix="try again when the machine is less busy: the files that are compiled are kept",
        ) from error


def _compiler_environment() -> dict[str, str]:
    # Errors are found by the word "error", which a localized compiler translates.
    environment = {**os.environ, "LC_ALL": "C"}
    if sanitizer_flags():
        # LD_PRELOAD is meant for this process; the compiler's own memory use is not to be checked.
        environment.pop("LD_PRELOAD", None)
    return environment


def _version_line(path: str) -> str | None:
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, check=True,
            timeout=_VERSION_SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.partition("\n")[0].strip()
