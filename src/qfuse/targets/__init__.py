"""Targets: facts about the hardware and software on which a graph will run."""

from __future__ import annotations

import importlib as _importlib
import typing as _typing

from qfuse.targets.compiler import Compiler
from qfuse.targets.cpu import FEATURES
from qfuse.targets.doctor import Affects, Environment, Finding, Level, diagnose
from qfuse.targets.kernels import KERNELS, KernelProbe, KernelState, probe_kernel
from qfuse.targets.storage import cache_directory, write_atomically
from qfuse.targets.target import Target

if _typing.TYPE_CHECKING:
    from qfuse.targets.threads import (
        can_limit_threads,
        checked_threads,
        limited_threads,
        set_threads,
    )

__all__ = [
    "FEATURES",
    "KERNELS",
    "Affects",
    "Compiler",
    "Environment",
    "Finding",
    "KernelProbe",
    "KernelState",
    "Level",
    "Target",
    "cache_directory",
    "can_limit_threads",
    "checked_threads",
    "diagnose",
    "limited_threads",
    "probe_kernel",
    "set_threads",
    "write_atomically",
]


def __getattr__(name: str) -> object:
    # On first access: two plans are compared without torch.
    if name in {"can_limit_threads", "checked_threads", "limited_threads", "set_threads"}:
        return getattr(_importlib.import_module("qfuse.targets.threads"), name)
    raise AttributeError(f"module 'qfuse.targets' has no attribute {name!r}")
