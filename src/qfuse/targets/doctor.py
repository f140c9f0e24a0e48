"""Diagnoses an installation: missing parts, and optimizations that would silently not happen.

Each check takes a :class:`Target` and an :class:`Environment`, both plain values, and yields
findings; only :meth:`Environment.probe` inspects the machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from qfuse.extensions import Installed, list_extensions
from qfuse.targets.compiler import CompilerFault, python_headers, try_compiler
from qfuse.targets.kernels import KernelState
from qfuse.targets.target import Target

# The released versions that qfuse is tested with: lower bound, and exclusive upper bound.
TORCH_RANGE = ((2, 13), (2, 16))
TORCHAO_RANGE = ((0, 18), (0, 19))
# From this version, Inductor's x86 patterns are in torchao's quantizer module.
PATTERNS_IN_TORCHAO = (2, 14)


class Level(StrEnum):
    """Severity of a finding: fine, costs performance, or breaks something."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"


class Affects(StrEnum):
    """What a finding costs, for a model whose predictions are known."""

    MACHINE = "machine"
    THREADS = "threads"
    OWN_KERNELS = "own-kernels"
    DECLARED_KERNELS = "declared-kernels"
    INDUCTOR = "inductor"
    AVOIDED = "avoided"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        level: Severity.
        what: The subject of the check, in a few words.
        detail: The observation and its consequences.
        fix: What to do; "" if no action is needed.
        affects: What it costs.
    """

    level: Level
    what: str
    detail: str
    fix: str = ""
    affects: Affects = Affects.MACHINE


@dataclass(frozen=True, slots=True)
class Environment:
    """Facts that are not part of a target, because qfuse's compilation does not depend on them.

    Attributes:
        freezing: Whether Inductor's global freezing switch is on.
        grad_enabled: Whether grad mode is on.
        pre_grad_pass: Name of Inductor's global pre-grad pass, ``None`` if it is not set.
        python_headers: Whether the interpreter's ``Python.h`` is installed.
        compiler_fault: Why the compiler does not build a small OpenMP library; ``None`` if it does.
        int_mm_fills_one_row: Whether ``aten._int_mm`` computes its result for one row.
        int_mm_exact: Whether ``aten._int_mm`` is correct over the full int8 range.
        tiles_refused: Whether the processor has AMX, and the system refuses its tiles.
        extensions: What installed packages add to qfuse.
    """

    freezing: bool = False
    grad_enabled: bool = True
    pre_grad_pass: str | None = None
    python_headers: bool = True
    compiler_fault: CompilerFault | None = None
    int_mm_fills_one_row: bool = True
    int_mm_exact: bool = True
    tiles_refused: bool = False
    extensions: tuple[Installed, ...] = ()

    @classmethod
    def probe(cls, target: Target) -> Environment:
        """Inspect this process; compiles one small file and runs two small matmuls."""
        from qfuse.targets import _torch_api  # noqa: PLC0415 - plans are compared without torch

        int_mm = target.has_kernel("aten::_int_mm")
        return cls(
            freezing=_torch_api.inductor_freezing(
                default=os.environ.get("TORCHINDUCTOR_FREEZING", "0") == "1"
            ),
            grad_enabled=_torch_api.grad_enabled(),
            pre_grad_pass=_torch_api.pre_grad_pass_installed(),
            python_headers=python_headers() is not None,
            compiler_fault=None if target.compiler is None else try_compiler(target.compiler),
            int_mm_fills_one_row=not int_mm or _torch_api.int_mm_fills_one_row(),
            int_mm_exact=not int_mm or _torch_api.int_mm_exact(),
            tiles_refused=target.has("amx_tile") and not _torch_api.has_amx_tiles(),
            extensions=list_extensions(),
        )


def diagnose(target: Target, environment: Environment | None = None) -> list[Finding]:
    """Check everything that decides whether quantized models run, correctly and fast.

    Args:
        target: The machine and its software.
        environment: The process; probed by default.

    Returns:
        Findings in a fixed order: hardware, software, kernels, extensions, then the pitfalls of
        plain ``torch.compile``, which qfuse avoids.
    """
    seen = Environment.probe(target) if environment is None else environment
    return [finding for check in _CHECKS for finding in check(target, seen)]


def _instruction_set(target: Target, _: Environment) -> Iterator[Finding]:
    what = "instruction set"
    names = ", ".join(sorted(target.features)) or "no known features"
    if target.architecture == "x86_64" and not target.has("avx2"):
        yield Finding(
            Level.BAD,
            what,
            f"no AVX2 ({names}): quantized models run on reference code",
            "use a machine with at least AVX2, preferably AVX512-VNNI or AMX",
        )
    elif not target.has_vnni:
        yield Finding(
            Level.WARN,
            what,
            f"no int8 dot products such as VNNI ({names}): exact int8 matmuls are at most 1.5 "
            "times as fast as f32, with such products several times",
            "for more, use a machine with AVX512-VNNI, AVX-VNNI or AMX",
        )
    else:
        yield Finding(Level.OK, what, names)


def _isa_limits(target: Target, seen: Environment) -> Iterator[Finding]:
    if seen.tiles_refused:
        yield Finding(
            Level.WARN,
            "AMX",
            "the CPU has it, Linux refuses its tiles to this process: kernels run without it",
            "look for a signal stack below 12 KB (sigaltstack) or a filter of system calls",
        )
    if target.onednn_isa_limit:
        yield Finding(
            Level.WARN,
            "oneDNN's instruction set",
            f"ONEDNN_MAX_CPU_ISA={target.onednn_isa_limit} keeps oneDNN below what the CPU has",
            "unset ONEDNN_MAX_CPU_ISA",
        )
    if target.has("avx512f") and not target.aten_capability.startswith("AVX512"):
        yield Finding(
            Level.WARN,
            "ATen's instruction set",
            f"the CPU has AVX512, ATen dispatches on {target.aten_capability}",
            "unset ATEN_CPU_CAPABILITY",
        )


def _threads(target: Target, _: Environment) -> Iterator[Finding]:
    what = "threads"
    detail = (
        f"torch uses {target.threads}, this process may use {target.usable_cores} "
        f"of {target.cores} cores"
    )
    if target.threads > target.usable_cores:
        yield Finding(
            Level.BAD,
            what,
            f"{detail}: oversubscribed threads cost milliseconds per operator",
            f"call torch.set_num_threads({target.usable_cores}) or set "
            f"OMP_NUM_THREADS={target.usable_cores}",
        )
    elif target.threads < min(target.usable_cores, target.cores):
        # `usable_cores` counts hyper-threads and `cores` does not: one thread per core is enough.
        yield Finding(
            Level.WARN,
            what,
            f"{detail}: cores stay idle",
            "unset OMP_NUM_THREADS or call torch.set_num_threads, unless this is intended",
            Affects.THREADS,
        )
    else:
        yield Finding(Level.OK, what, detail)


def _compiler(target: Target, seen: Environment) -> Iterator[Finding]:
    what = "C++ compiler"
    fix = "install g++ with OpenMP (Debian: apt install g++), or name another compiler in CXX"
    if target.compiler is None:
        lost = "Inductor cannot compile, and qfuse's own kernels cannot be built"
        detail = f"none found (CXX, else g++): {lost}"
        yield Finding(Level.BAD, what, detail, fix, Affects.OWN_KERNELS)
    elif (fault := seen.compiler_fault) is not None:
        said = f"{target.compiler.path} cannot build a library that works with torch: {fault.what}"
        yield Finding(Level.BAD, what, said, fault.fix or fix, Affects.OWN_KERNELS)
    else:
        yield Finding(Level.OK, what, f"{target.compiler.path}: {target.compiler.version}")
    if not seen.python_headers:
        yield Finding(
            Level.WARN,
            "Python headers",
            "Python.h is missing: plain torch.compile cannot bind the code that it compiles",
            "install the headers of this interpreter (Debian: apt install python3-dev)",
            Affects.INDUCTOR,
        )


def _versions(target: Target, _: Environment) -> Iterator[Finding]:
    yield _version("torch", target.torch_version, TORCH_RANGE)
    yield _version("torchao", target.torchao_version, TORCHAO_RANGE)


def _version(
    package: str, version: str | None, supported: tuple[tuple[int, int], tuple[int, int]]
) -> Finding:
    least, below = ("{}.{}".format(*bound) for bound in supported)
    fix = f"pip install '{package}>={least},<{below}'"
    if version is None:
        return Finding(Level.BAD, package, "not installed", fix)
    if supported[0] <= _release(version) < supported[1]:
        return Finding(Level.OK, package, version)
    detail = f"{version} is outside of what qfuse is tested with (>={least}, <{below})"
    return Finding(Level.BAD, package, detail, fix)


def _release(version: str) -> tuple[int, int]:
    """Return major and minor version; one that cannot be parsed sorts before all others."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def _mkldnn(target: Target, _: Environment) -> Iterator[Finding]:
    if target.mkldnn_enabled:
        yield Finding(Level.OK, "oneDNN", "enabled")
    else:
        yield Finding(
            Level.BAD,
            "oneDNN",
            "disabled or not built in: int8 and bf16 matmuls run on reference code",
            "set torch.backends.mkldnn.enabled = True, or install an official torch wheel",
        )


def _kernels(target: Target, _: Environment) -> Iterator[Finding]:
    by_state = {
        state: [name for name, known in target.kernels if known is state] for state in KernelState
    }
    there = by_state[KernelState.AVAILABLE]
    yield Finding(Level.OK, "kernels", f"{len(there)} available: {', '.join(there)}")
    hollow = by_state[KernelState.SCHEMA_ONLY]
    if hollow:
        yield Finding(
            Level.WARN,
            "kernels that are only declared",
            f"{', '.join(hollow)}: hasattr(torch.ops...) is true, but calling them raises "
            "NotImplementedError",
            "nothing, qfuse uses other kernels; the PyPI wheel of torchao lacks CPU code, a "
            "build from source has it",
            Affects.DECLARED_KERNELS,
        )
    missing = by_state[KernelState.ABSENT]
    if missing:
        yield Finding(
            Level.WARN,
            "kernels that do not exist",
            f"this torch and torchao do not define {', '.join(missing)}",
            "nothing, qfuse uses other kernels; or install the supported versions",
            Affects.DECLARED_KERNELS,
        )


def _extensions(_: Target, seen: Environment) -> Iterator[Finding]:
    for one in seen.extensions:
        what = f"{one.what} {one.name!r}"
        if one.problem:
            fix = "repair the package, or uninstall it to go on without it"
            yield Finding(Level.BAD, what, one.problem, fix)
        else:
            yield Finding(Level.OK, what, f"of {one.origin}: {one.value}")


def _int_mm(target: Target, seen: Environment) -> Iterator[Finding]:
    what = "aten._int_mm"
    own = "qfuse never calls it there"
    if not seen.int_mm_fills_one_row:
        yield Finding(
            Level.BAD,
            f"{what} of one row",
            "returns uninitialized memory when a row stride is below its length, which is what "
            "torch.compile emits for one token of a dynamically quantized model: results are "
            "garbage, without an error",
            f"compile with qfuse ({own}), or pad such inputs to two rows",
            Affects.AVOIDED,
        )
    if not seen.int_mm_exact:
        yield Finding(
            Level.BAD,
            f"{what} at full range",
            "is wrong for large int8 values: partial sums overflow on this CPU",
            f"compile with qfuse ({own}), or quantize to 7 bits (reduce_range)",
            Affects.AVOIDED,
        )
    elif not target.has_exact_onednn and target.has_kernel("aten::_int_mm"):
        # A sample can show that sums saturate, but not that none do.
        yield Finding(
            Level.WARN,
            f"{what} without VNNI",
            "was correct on a sample, but is known to overflow on CPUs without VNNI",
            "check your model's results, or quantize to 7 bits (reduce_range)",
        )


def _convolution(target: Target, _: Environment) -> Iterator[Finding]:
    # Seen with torch 2.13 (oneDNN 3.12). A probe would tell by chance.
    if target.has_onednn_amx:
        yield Finding(
            Level.WARN,
            "bfloat16 convolutions with AMX",
            "torch reads uninitialized memory where the result has one column, and the kernel "
            "moves along the columns by more than one: results vary, without an error",
            "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, or pad such images by a column",
        )


def _torch_compile(target: Target, seen: Environment) -> Iterator[Finding]:
    what = "plain torch.compile"
    if not seen.freezing:
        yield Finding(
            Level.WARN,
            f"{what}: freezing is off",
            "Inductor's int8 patterns run only on frozen graphs; without freezing, layers between "
            "quantize and dequantize silently run in float",
            "use qfuse.compile, which does not need it; or set TORCHINDUCTOR_FREEZING=1 before "
            'torch is imported (options={"freezing": True} alone crashes)',
            Affects.INDUCTOR,
        )
    if seen.grad_enabled:
        yield Finding(
            Level.WARN,
            f"{what}: grad mode is on",
            "freezing is skipped while gradients are recorded, and with it every int8 pattern",
            "use qfuse.compile; or call the compiled model under torch.no_grad()",
            Affects.INDUCTOR,
        )
    yield Finding(
        Level.WARN,
        "plain AOTInductor",
        "does not freeze unless its options say so, so the same holds for its packages",
        "use qfuse.compile; or pass freezing in its options, under torch.no_grad()",
        Affects.INDUCTOR,
    )
    if _release(target.torch_version) >= PATTERNS_IN_TORCHAO:
        yield Finding(
            Level.WARN,
            f"{what}: int8 patterns moved",
            "since torch 2.14 they are in torchao's x86 quantizer module: a process that does not "
            "import it does not fuse, and importing it overwrites what was set in Inductor's "
            "pre_grad_custom_pass",
            "use qfuse.compile; or import the quantizer first and set your own pass after it",
            Affects.INDUCTOR,
        )
    if seen.pre_grad_pass is not None:
        yield Finding(
            Level.WARN,
            f"{what}: a pre-grad pass is already set",
            f"torch._inductor.config.pre_grad_custom_pass is {seen.pre_grad_pass}; importing "
            "torchao's x86 quantizer overwrites it",
            "if it is your own pass, set it again after that import, as a list of both",
            Affects.INDUCTOR,
        )


_CHECKS: tuple[Callable[[Target, Environment], Iterator[Finding]], ...] = (
    _instruction_set,
    _isa_limits,
    _threads,
    _compiler,
    _versions,
    _mkldnn,
    _kernels,
    _extensions,
    _int_mm,
    _convolution,
    _torch_compile,
)
