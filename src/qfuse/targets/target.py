"""The target of a compilation: facts about hardware and software, detected once."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from qfuse.ir.errors import OptionsError
from qfuse.ir.files import parse_json
from qfuse.targets.compiler import Compiler, find_compiler
from qfuse.targets.cpu import FEATURES, read_cpu
from qfuse.targets.kernels import KERNELS, KernelProbe, KernelState, probe_kernels


@dataclass(frozen=True, slots=True)
class Target:
    """Facts about the hardware and software on which a graph will run.

    It is a value: nothing is queried after construction, so that a compilation sees a consistent
    machine throughout.

    Attributes:
        device: Device type; only ``cpu`` is detected.
        architecture: ``x86_64``, ``aarch64``, ...
        vendor: CPU vendor, such as ``AuthenticAMD``; "" if unknown.
        model: CPU model name; "" if unknown.
        features: Usable instruction sets, out of :data:`qfuse.targets.FEATURES`.
        aten_capability: The ISA that ATen dispatches on (``AVX512``, ``AVX2``, ``DEFAULT``, ...).
        onednn_isa_limit: Value of ``ONEDNN_MAX_CPU_ISA``, "" if unset.
        cores: Physical cores.
        usable_cores: Cores that this process may use (affinity, container quota).
        threads: ``torch.get_num_threads()``.
        l2_bytes: L2 cache of one core; 0 if unknown.
        l3_bytes: One last-level cache; 0 if unknown or absent.
        compiler: The C++ compiler that Inductor would use, ``None`` if there is none.
        torch_version: With its local part.
        torchao_version: ``None`` if torchao is not installed.
        mkldnn_enabled: Whether oneDNN is built into torch and enabled.
        kernels: Name and state of every probed operator, sorted by name.
    """

    device: str
    architecture: str
    vendor: str
    model: str
    features: frozenset[str]
    aten_capability: str
    onednn_isa_limit: str
    cores: int
    usable_cores: int
    threads: int
    l2_bytes: int
    l3_bytes: int
    compiler: Compiler | None
    torch_version: str
    torchao_version: str | None
    mkldnn_enabled: bool
    kernels: tuple[tuple[str, KernelState], ...]

    @classmethod
    def detect(
        cls, *, extensions: bool = True, extra_kernels: Iterable[KernelProbe] = ()
    ) -> Target:
        """Detect the target of this machine and process.

        Everything is queried anew, in milliseconds, because a process can change its threads, its
        affinity or oneDNN's switch; only the compiler's ``--version`` is cached.

        Args:
            extensions: Import torchao (over a second, the first time) to see which of its kernels
                exist. Without it they are *unprobed* and the fingerprint differs.
            extra_kernels: Operators to probe besides :data:`qfuse.targets.KERNELS`.
        """
        from qfuse.targets import _torch_api  # noqa: PLC0415 - plans are compared without torch

        cpu = read_cpu(_torch_api.cpu_capabilities())
        return cls(
            device="cpu",
            architecture=cpu.architecture,
            vendor=cpu.vendor,
            model=cpu.model,
            features=cpu.features,
            aten_capability=_torch_api.aten_capability(),
            onednn_isa_limit=_onednn_isa_limit(),
            cores=cpu.cores,
            usable_cores=cpu.usable_cores,
            threads=_torch_api.thread_count(),
            l2_bytes=cpu.l2_bytes,
            l3_bytes=cpu.l3_bytes,
            compiler=find_compiler(),
            torch_version=_torch_api.torch_version(),
            torchao_version=_installed_version("torchao"),
            mkldnn_enabled=_torch_api.mkldnn_enabled(),
            kernels=probe_kernels((*KERNELS, *extra_kernels), import_packages=extensions),
        )

    @classmethod
    def for_testing(cls, *, isa: str = "avx512_vnni", **changes: Any) -> Target:
        """Return a fixed, machine-independent target: an x86 CPU with 2 cores.

        Args:
            isa: Its best instruction set: ``portable`` (without vector extensions of kernels),
                ``avx2``, ``avx_vnni``, ``avx512``, ``avx512_vnni`` or ``amx``. It determines
                ``features`` and ``aten_capability``.
            **changes: Fields to replace. ``kernels`` may be a mapping of name to state, which is
                merged into the fixed ones.

        Raises:
            OptionsError: ``isa`` is unknown.
        """
        if isa not in _TESTING_ISAS:
            raise OptionsError(
                f"unknown instruction set {isa!r}", fix=f"use one of {', '.join(_TESTING_ISAS)}"
            )
        capability, features = _TESTING_ISAS[isa]
        states = {
            probe.name: KernelState.SCHEMA_ONLY
            if probe.namespace == "torchao"
            else KernelState.AVAILABLE
            for probe in KERNELS
        }
        states.update(changes.pop("kernels", {}))
        pinned = cls(
            device="cpu",
            architecture="x86_64",
            vendor="AuthenticAMD",
            model="AMD EPYC",
            features=features,
            aten_capability=capability,
            onednn_isa_limit="",
            cores=2,
            usable_cores=2,
            threads=2,
            l2_bytes=1 << 20,
            l3_bytes=32 << 20,
            compiler=Compiler("/usr/bin/g++", "g++ (GCC) 12.2.0"),
            torch_version="2.13.0+cpu",
            torchao_version="0.18.0",
            mkldnn_enabled=True,
            kernels=tuple(sorted(states.items())),
        )
        return replace(pinned, **changes)

    def has(self, feature: str) -> bool:
        """Whether an instruction set is usable.

        Raises:
            OptionsError: The name is not in :data:`qfuse.targets.FEATURES`.
        """
        if feature not in FEATURES:
            raise OptionsError(
                f"unknown CPU feature {feature!r}", fix=f"use one of {', '.join(FEATURES)}"
            )
        return feature in self.features

    @property
    def has_vnni(self) -> bool:
        """Whether the CPU has int8 dot products that accumulate in 32 bits without saturation."""
        names = ("avx512_vnni", "avx_vnni", "avx_vnni_int8", "amx_int8", "dot", "i8mm")
        return any(map(self.has, names))

    @property
    def has_exact_onednn(self) -> bool:
        """Whether int8 products of oneDNN do not saturate: it has such dot products and uses them.

        ``ONEDNN_MAX_CPU_ISA`` may keep it from that.
        """
        limit = self.onednn_isa_limit.upper()
        if limit in _ONEDNN_VNNI:
            return self.has(_ONEDNN_VNNI[limit])
        return self.has_vnni and limit not in _ONEDNN_WITHOUT_VNNI

    @property
    def has_onednn_amx(self) -> bool:
        """Whether oneDNN is enabled and uses AMX for bfloat16."""
        limit = self.onednn_isa_limit.upper()
        allowed = limit in {"", "ALL", "DEFAULT"} or "AMX" in limit
        return allowed and self.mkldnn_enabled and self.has("amx_bf16")

    def kernel_state(self, name: str) -> KernelState:
        """Return the availability of an operator.

        Raises:
            OptionsError: It was not probed for this target.
        """
        for known, state in self.kernels:
            if known == name:
                return state
        raise OptionsError(
            f"{name!r} was not probed for this target",
            fix="pass a KernelProbe for it in Target.detect(extra_kernels=...)",
        )

    def has_kernel(self, name: str) -> bool:
        """Whether an operator has a kernel here, not only a schema."""
        return self.kernel_state(name) is KernelState.AVAILABLE

    def fingerprint(self) -> str:
        """Return a stable name of these facts for cache keys: ``x86_64-avx512-t2-<digest>``.

        Of the compiler, the version is included but not the path.
        """
        facts = self.to_dict()
        # The same compiler in another folder makes the same code.
        facts["compiler"] = self.compiler and self.compiler.version
        return self._named(facts)

    def machine_fingerprint(self) -> str:
        """Return a stable name of what speeds depend on: hardware, threads, torch, oneDNN.

        It does not depend on ``extensions``.
        """
        facts = self.to_dict()
        # Upgrading these need not measure the machine again.
        for other in ("compiler", "torchao_version", "kernels"):
            del facts[other]
        return self._named(facts)

    def _named(self, facts: Mapping[str, Any]) -> str:
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        isa = self.aten_capability.lower().replace(" ", "_")
        return f"{self.architecture}-{isa}-t{self.threads}-{digest}"

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values, in a deterministic order."""
        return {
            **asdict(self),
            "features": sorted(self.features),
            "kernels": {name: state.value for name, state in self.kernels},
        }

    def to_json(self) -> str:
        """Serialize for :meth:`from_json`."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the output of :meth:`to_json`.

        Raises:
            OptionsError: The text is not a target, or one of its fields is missing, unknown or of
                the wrong type.
        """
        try:
            return cls._from_dict(parse_json(text))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OptionsError(
                f"this is not the description of a target: {error}",
                fix="write it with Target.detect().to_json()",
            ) from error

    @classmethod
    def _from_dict(cls, data: dict[str, Any]) -> Self:
        names = {field.name for field in fields(cls)}
        if set(data) != names:
            raise ValueError(f"its fields differ in {sorted(names ^ set(data))}")
        plain = {name: _checked(name, field, data[name]) for name, field in _PLAIN.items()}
        compiler = data["compiler"]
        return cls(
            **plain,
            features=frozenset(_checked("feature", str, name) for name in data["features"]),
            compiler=None if compiler is None else Compiler(**compiler),
            kernels=tuple(sorted((n, KernelState(s)) for n, s in data["kernels"].items())),
        )


_AVX2 = frozenset(("avx", "avx2"))
_AVX512 = _AVX2 | {"avx512bw", "avx512dq", "avx512f", "avx512vl"}
_AVX512_VNNI = _AVX512 | {"avx512_bf16", "avx512_vnni"}
# ATen's capability and the features, per instruction set of a test target.
_TESTING_ISAS = {
    "portable": ("DEFAULT", frozenset[str]()),
    "avx2": ("AVX2", _AVX2),
    "avx_vnni": ("AVX2", _AVX2 | {"avx_vnni"}),
    "avx512": ("AVX512", _AVX512),
    "avx512_vnni": ("AVX512", _AVX512_VNNI),
    "amx": ("AVX512", _AVX512_VNNI | {"amx_bf16", "amx_int8", "amx_tile"}),
}

# Values of ONEDNN_MAX_CPU_ISA without int8 dot products.
_ONEDNN_WITHOUT_VNNI = frozenset(("SSE41", "AVX", "AVX2", "AVX512_CORE"))
# Those with one kind of them, which a CPU with the other kind may lack, as Zen 4 lacks AVX-VNNI.
_ONEDNN_VNNI = {
    "AVX2_VNNI": "avx_vnni",
    "AVX2_VNNI_2": "avx_vnni",
    "AVX512_CORE_VNNI": "avx512_vnni",
    "AVX512_CORE_BF16": "avx512_vnni",
}

# Fields that are stored in JSON unchanged, and their types.
_PLAIN: dict[str, Any] = {
    "device": str,
    "architecture": str,
    "vendor": str,
    "model": str,
    "aten_capability": str,
    "onednn_isa_limit": str,
    "cores": int,
    "usable_cores": int,
    "threads": int,
    "l2_bytes": int,
    "l3_bytes": int,
    "torch_version": str,
    "torchao_version": (str, type(None)),
    "mkldnn_enabled": bool,
}


def _checked(name: str, kind: Any, value: Any) -> Any:
    # JSON's true is a bool, which is an int in Python.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{name} is {value!r}")
    return value


def _installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _onednn_isa_limit() -> str:
    return os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", ""))
