"""The machine and software of a measurement."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil
import torch

from qfuse import __version__, kernels
from qfuse.cost import load_or_measure
from qfuse.targets import Target

_PACKAGES = ("torch", "torchao", "transformers")
_LOOK_SECONDS = 0.2
_QUIET_PERCENT = 15.0
_ISA = ("amx_int8", "avx512_bf16", "avx512_vnni", "avx_vnni", "avx512f", "avx2")


@dataclass(frozen=True, slots=True)
class Setting:
    """Machine and software.

    Attributes:
        cpu: CPU model, with its int8 and bf16 instructions.
        cores: Number of usable cores.
        threads: OpenMP threads of every contender.
        memory: Bytes of RAM.
        versions: Packages and their versions.
        date: Day of the run, in UTC.
    """

    cpu: str
    cores: int
    threads: int
    memory: int
    versions: tuple[tuple[str, str], ...]
    date: str

    @classmethod
    def here(cls, threads: int) -> Setting:
        """Describe this machine."""
        target = Target.detect(extensions=False)
        has = [name for name in _ISA if target.has(name)] if target.architecture == "x86_64" else []
        lacks = [] if "amx_int8" in has or not has else ["no AMX"]
        details = ", ".join([*has, *lacks])
        name = " ".join(filter(None, (target.model or target.architecture, f"({details})")))
        versions = [(package, _version(package)) for package in _PACKAGES]
        own = ("qfuse", " ".join(filter(None, (__version__, _commit()))))
        return cls(
            cpu=name,
            cores=target.usable_cores,
            threads=threads,
            memory=psutil.virtual_memory().total,
            versions=(own, ("Python", platform.python_version()), *versions),
            date=datetime.now(UTC).date().isoformat(),
        )


class BackgroundLoad:
    """The load by other programs between two points in time.

    Workers are excluded only while they live, so query before they end.
    """

    def __init__(self) -> None:
        self._busy, self._whole = _cores_busy()
        self._own = _own_seconds()

    def share(self) -> float:
        """Return the fraction of all cores that other programs used since the start."""
        busy, whole = _cores_busy()
        passed = whole - self._whole
        if passed <= 0:
            return 0.0
        others = (busy - self._busy) - (_own_seconds() - self._own)
        return min(max(others / passed, 0.0), 1.0)


def prepare_machine(threads: int) -> None:
    """Do qfuse's one-time setup of a machine: build the kernels, measure the machine.

    Contenders are built two at a time, while measuring needs an idle machine.
    """
    kernels.load()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        load_or_measure(Target.detect(extensions=False))
    finally:
        torch.set_num_threads(before)


class IdleWait:
    """Waits until other programs are idle, up to a total limit.

    Args:
        seconds: How long to wait, over all rounds together.
        busy: Returns how much of the cores is used during so many seconds, in percent.
    """

    def __init__(self, seconds: float, busy: Callable[[float], float] = psutil.cpu_percent) -> None:
        self._looks = round(seconds / _LOOK_SECONDS)
        self._busy = busy

    def wait(self) -> None:
        """Return when the machine is idle, or the limit is reached."""
        while self._looks > 0:
            self._looks -= 1
            if self._busy(_LOOK_SECONDS) < _QUIET_PERCENT:
                return


def _cores_busy() -> tuple[float, float]:
    """Return the busy seconds and the total seconds of all cores."""
    times = psutil.cpu_times()
    whole = sum(times)
    idle = times.idle + getattr(times, "iowait", 0.0)
    return whole - idle, whole


def _own_seconds() -> float:
    me = psutil.Process()
    family = [me, *me.children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in family)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _commit() -> str:
    """Return the commit of the checkout that this runs from, "" if it is no checkout."""
    folder = Path(__file__).resolve().parent
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return f"({found.stdout.strip()})" if found.returncode == 0 else ""
