"""Check the C++ compiler, and whether code that was compiled elsewhere runs on this machine."""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from pathlib import Path

import torch

from qfuse.backends import _inductor_api
from qfuse.ir.compiler_limits import limit_behind
from qfuse.ir.errors import BackendError
from qfuse.targets.compiler import Compiler, find_compiler, try_compiler
from qfuse.targets.storage import write_atomically

# Of what is tried: a result of earlier trials is not taken.
_TRIALS = "2"
_TRIAL_SECONDS = 60
_TRIAL_SOURCE = "#include <immintrin.h>\nint main() { return 0; }\n"
_INSTALL = "install g++ or clang++ (on Debian and Ubuntu: apt-get install g++), or set CXX to one"

# ISA names of packages that differ from those of `torch.cpu.get_capabilities`.
_CAPABILITY = {"avx512": "avx512_f"}


def check_toolchain(folder: Path) -> dict[str, object]:
    """Check, once per compiler and torch, that C++ can be compiled; return Inductor's options.

    Inductor would test every vector ISA with two processes each, for seconds in every process that
    compiles. Here the widest ISA is tested once, and the result is cached.

    Args:
        folder: Where the result is cached, if it is writable.

    Raises:
        BackendError: There is no compiler, or it fails to compile a small library.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BackendError("there is no C++ compiler", fix=f'{_INSTALL}, or use backend="eager"')
    flags = _inductor_api.arch_flags()
    stamp = folder / f"compiler-{_digest(compiler, flags)}.txt"
    known = _read(stamp)
    if known is None:
        wrong = try_compiler(compiler)
        if wrong is not None:
            raise BackendError(
                f"the C++ compiler {compiler.path} does not work: {wrong.what}",
                fix=f'{wrong.fix or _INSTALL}, or use backend="eager"',
            )
        # Otherwise Inductor looks for an ISA that works itself.
        known = "flags work" if flags and _accepts(compiler, flags) else "ask Inductor"
        _write(stamp, known)
    return {"cpp.vec_isa_ok": True} if known == "flags work" else {}


def isa_runs_here(isa: str) -> bool:
    """Whether this machine has all instruction sets of ``isa``, in the naming of packages.

    >>> isa_runs_here("AVX512 AMX_NEXT")
    False
    """
    capabilities = torch.cpu.get_capabilities()
    if capabilities.get("architecture") != "x86_64":
        # ARM has one name for all its ISAs; the key distinguishes them.
        return not {"avx2", "avx512"} & set(isa.lower().split())
    names = (
        _CAPABILITY.get(name, name) for name in isa.lower().split() if name != "invalid_vec_isa"
    )
    return all(bool(capabilities.get(name)) for name in names)


def _accepts(compiler: Compiler, flags: tuple[str, ...]) -> bool:
    """Whether a compiler accepts the flags of an instruction set.

    Raises:
        BackendError: It was ended by a limit, which says nothing about the flags.
    """
    with tempfile.TemporaryDirectory(prefix="qfuse-trial-") as name:
        source = Path(name, "trial.cpp")
        source.write_text(_TRIAL_SOURCE, encoding="utf-8")
        command = [compiler.path, *flags, "-c", "-o", str(source.with_suffix(".o")), str(source)]
        try:
            subprocess.run(command, capture_output=True, check=True, timeout=_TRIAL_SECONDS)
        except (OSError, subprocess.SubprocessError) as error:
            limit = limit_behind(error)
            if limit is not None:
                raise BackendError(
                    f"the C++ compiler {compiler.path} does not work: {limit.what}",
                    fix=f'{limit.fix}, or use backend="eager"',
                ) from error
            return False
    return True


def _digest(compiler: Compiler, flags: tuple[str, ...]) -> str:
    facts = (_TRIALS, compiler.path, compiler.version, *flags, torch.__version__)
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def _read(stamp: Path) -> str | None:
    try:
        return stamp.read_text(encoding="utf-8")
    except OSError:
        return None


def _write(stamp: Path, text: str) -> None:
    try:
        write_atomically(stamp, text)
    except OSError:
        # The test is repeated next time; nothing else depends on the cache.
        return
