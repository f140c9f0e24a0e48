"""Measured times of single products, and their store on disk beside the profile."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import filelock

from qfuse._version import __version__
from qfuse.ir.errors import CacheError
from qfuse.ir.files import parse_json
from qfuse.ir.locks import locked
from qfuse.targets import Target, cache_directory, write_atomically

_log = logging.getLogger(__name__)

# Of the other format, times were those of calls from Python.
_FORMAT = 2
_LOCK_SECONDS = 30

Seconds = Mapping[str, float]
"""Seconds per call, by the name of what computes a product."""


@dataclass(slots=True)
class Times:
    """Measured seconds of the alternatives for products.

    Attributes:
        known: By the text of a product, then by the name of a kernel, or ``float``. The text has
            what the time depends on: op, sizes, dtypes, granularities, epilogue.
        used: Those of them that were asked for.
    """

    known: dict[str, dict[str, float]] = field(default_factory=dict)
    used: dict[str, dict[str, float]] = field(default_factory=dict)

    def of(self, product: str) -> Seconds:
        """Return the times of a product; none if it was not measured."""
        found = self.known.get(product)
        if found is None:
            return {}
        self.used[product] = found
        return found

    def add(self, product: str, seconds: Seconds) -> None:
        """Add the times of a product."""
        self.known[product] = dict(seconds)


def times_path(target: Target, kernels: str, directory: Path | None = None) -> Path:
    """Return the path of the measured times of a target.

    Args:
        target: The machine.
        kernels: The compiled library of kernels, and the instruction set that they use.
        directory: Cache folder; default :func:`qfuse.targets.cache_directory`.
    """
    key = json.dumps(_times_key(target, kernels), sort_keys=True)
    digest = hashlib.sha256(key.encode()).hexdigest()[:24]
    return (directory or cache_directory()) / "cost" / f"{digest}.times.json"


def load_times(target: Target, kernels: str, directory: Path | None = None) -> Times:
    """Return the stored times of a target; none if there are none, or if they are damaged."""
    path = times_path(target, kernels, directory)
    try:
        return Times(_parsed_times(path.read_text(encoding="utf-8"), target, kernels))
    except FileNotFoundError:
        return Times()
    except (OSError, ValueError, CacheError) as error:
        _log.warning("the measured times at %s are not used: %s", path, error)
        return Times()


def save_times(times: Times, target: Target, kernels: str, directory: Path | None = None) -> None:
    """Add ``times`` to the stored ones; what cannot be written is logged."""
    path = times_path(target, kernels, directory)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock"), _LOCK_SECONDS):
            # Another process may have stored others meanwhile.
            entries = {**load_times(target, kernels, directory).known, **times.known}
            record = {"format": _FORMAT, "key": _times_key(target, kernels), "times": entries}
            write_atomically(path, json.dumps(record, indent=1))
    except (OSError, filelock.Timeout) as error:
        _log.warning("the measured times cannot be kept at %s: %s", path, error)


def read_times(data: object) -> dict[str, dict[str, float]]:
    """Return the entries of :attr:`Times.known` from JSON values.

    Raises:
        CacheError: They have another form.
    """
    if not isinstance(data, dict):
        raise CacheError("the times are not an object")
    for product, seconds in data.items():
        if not isinstance(seconds, dict) or not all(map(_is_time, seconds.values())):
            raise CacheError(f"the times of {product!r} are not positive numbers")
    return data


def _is_time(value: object) -> bool:
    # By exact type, since a bool is an int in Python.
    return type(value) in {float, int} and math.isfinite(value) and value > 0  # type: ignore[arg-type, operator]


def _times_key(target: Target, kernels: str) -> dict[str, Any]:
    return {
        "machine": target.machine_fingerprint(),
        "torch": target.torch_version,
        "threads": target.threads,
        "qfuse": __version__,
        "kernels": kernels,
    }


def _parsed_times(text: str, target: Target, kernels: str) -> dict[str, dict[str, float]]:
    record = parse_json(text)
    if not isinstance(record, dict) or record.get("format") != _FORMAT:
        raise CacheError("they were written by another version")
    if record.get("key") != _times_key(target, kernels):
        raise CacheError("they were measured on another machine")
    return read_times(record.get("times"))
