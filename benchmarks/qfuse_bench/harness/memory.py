"""The resident memory of this process, and its peak."""

from __future__ import annotations

import ctypes
import gc
import re
from dataclasses import dataclass
from pathlib import Path

import psutil

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident memory of a process, in bytes.

    Attributes:
        resident: Now, after unused memory was given back to the system.
        peak: At most since :func:`reset_peak`, or since the process began; ``None`` if the
            operating system does not tell.
    """

    resident: int
    peak: int | None


def read_memory() -> Memory:
    """Return the resident memory of this process."""
    peak = _read_peak()
    gc.collect()
    _trim()
    return Memory(int(psutil.Process().memory_info().rss), peak)


def reset_peak() -> bool:
    """Count the peak from now on; return whether the operating system can."""
    gc.collect()
    _trim()
    try:
        _CLEAR.write_text(_RESET_PEAK, encoding="ascii")
    except OSError:
        return False
    return True


def _read_peak() -> int | None:
    try:
        found = _PEAK.search(_STATUS.read_text(encoding="ascii", errors="replace"))
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def _trim() -> None:
    """Return freed memory to the system, which glibc otherwise keeps."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # not glibc
        return
    trim(0)
