"""The on-disk store of profiles: measured once per machine, and validated on every load."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from qfuse.cost._torch_api import kernels_in_use
from qfuse.cost.measurement import measure
from qfuse.cost.profile import CostProfile
from qfuse.ir.errors import CacheError, OptionsError
from qfuse.ir.files import parse_json
from qfuse.ir.locks import locked
from qfuse.targets import Target, cache_directory, write_atomically

_log = logging.getLogger(__name__)

_FORMAT = 6
# A profile measured on a busy machine is measured again by later processes, up to this often, and
# the best speeds are kept. Then it is final, so that the keys of compiled models become stable.
_MAX_ATTEMPTS = 3
_LOCK_SECONDS = 30


@dataclass(frozen=True, slots=True)
class _Entry:
    profile: CostProfile
    attempts: int

    @property
    def settled(self) -> bool:
        return self.profile.quiet or self.attempts >= _MAX_ATTEMPTS


def profile_path(target: Target, directory: Path | None = None) -> Path:
    """Return the path of a target's profile."""
    digest = hashlib.sha256(json.dumps(_key(target), sort_keys=True).encode()).hexdigest()[:24]
    return (directory or cache_directory()) / "cost" / f"{digest}.json"


def load_or_measure(
    target: Target,
    directory: Path | None = None,
    measure: Callable[[Target], CostProfile] = measure,
) -> CostProfile:
    """Return the profile of a target: from disk, or measured now and stored.

    Of several concurrent processes, one measures and the others wait for it. An entry that is
    corrupt or belongs to another machine is replaced. If the store is not writable, the profile is
    measured for this process only. Both are logged.

    Args:
        target: The machine, as detected in this process.
        directory: Cache folder; default :func:`qfuse.targets.cache_directory`.
        measure: Function that measures a profile.
    """
    path = profile_path(target, directory)
    # A corrupt entry is logged only once, by the second read under the lock.
    entry = _load(path, target, level=logging.DEBUG)
    if entry is not None and entry.settled:
        return entry.profile
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock"), _LOCK_SECONDS):
            return _measure_again(path, target, entry, measure)
    except (OSError, filelock.Timeout) as error:
        _log.warning("the cost profile cannot be kept at %s: %s", path, error)
        return measure(target)


def _measure_again(
    path: Path, target: Target, seen: _Entry | None, measure: Callable[[Target], CostProfile]
) -> CostProfile:
    """Measure under the lock, unless another process did while this one waited."""
    entry = _load(path, target, level=logging.WARNING)
    # An entry that changed while this process waited is a new measurement: one is enough.
    if entry is not None and (entry.settled or entry != seen):
        return entry.profile
    profile = measure(target)
    attempts = 1
    if entry is not None:
        attempts += entry.attempts
        # Noise only makes measurements slower; a quiet one needs no help from older ones.
        profile = profile if profile.quiet else entry.profile.best_of(profile)
    record = {
        "format": _FORMAT,
        "key": _key(target),
        "attempts": attempts,
        "profile": profile.to_dict(),
    }
    write_atomically(path, json.dumps(record, indent=2))
    if not profile.quiet:
        _log.info("the cost profile was measured under background load")
    return profile


def _key(target: Target) -> dict[str, Any]:
    return {
        "machine": target.machine_fingerprint(),
        "torch": target.torch_version,
        "threads": target.threads,
        "kernels": kernels_in_use(),
    }


def _load(path: Path, target: Target, *, level: int) -> _Entry | None:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.log(level, "the cost profile at %s cannot be read, measuring again: %s", path, error)
        return None
    try:
        return _parse(text, target)
    except CacheError as error:
        _log.log(level, "the cost profile at %s is measured again: %s", path, error)
        return None


def _parse(text: str, target: Target) -> _Entry:
    """Parse an entry.

    Raises:
        CacheError: It is corrupt, or has a different format or machine.
    """
    try:
        record = parse_json(text)
        if record["format"] != _FORMAT or record["key"] != _key(target):
            raise CacheError("it was written by another version or on another machine")
        profile = CostProfile.from_dict(record["profile"])
        attempts = int(record["attempts"])
    except (ValueError, KeyError, TypeError, OptionsError) as error:
        raise CacheError(f"it is corrupt: {error}") from error
    if (profile.machine, profile.threads) != (target.machine_fingerprint(), target.threads):
        raise CacheError("its profile is of another machine")
    return _Entry(profile, attempts)
