"""Profiles on disk: measured once per machine, kept, and never believed blindly."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from qfuse.cost.measurement import measure
from qfuse.cost.profile import CostProfile
from qfuse.ir.errors import CacheError, OptionsError
from qfuse.targets import Target, cache_directory, write_atomically

_log = logging.getLogger(__name__)

_FORMAT = 1
# A profile taken on a busy machine is taken again by later processes, this often in all, and the
# best numbers are kept. After that it stays, and with it the keys of compiled models.
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
    """Where the profile of a target is kept."""
    digest = hashlib.sha256(json.dumps(_key(target), sort_keys=True).encode()).hexdigest()[:24]
    return (directory or cache_directory()) / "cost" / f"{digest}.json"


def load_or_measure(
    target: Target,
    directory: Path | None = None,
    measure: Callable[[Target], CostProfile] = measure,
) -> CostProfile:
    """The profile of a target: from disk, or measured now and kept.

    Of several processes that need it at once, one measures and the others wait for it. An entry
    that is corrupt or belongs to another machine is made again. Where nothing can be kept, the
    profile is measured for this process alone. Both leave a line in the log.

    Args:
        target: The machine, as detected in this process.
        directory: Cache folder instead of :func:`qfuse.targets.cache_directory`.
        measure: How to measure.
    """
    path = profile_path(target, directory)
    # A fault is logged once: by the second look, under the lock.
    entry = _load(path, target, level=logging.DEBUG)
    if entry is not None and entry.settled:
        return entry.profile
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(path.with_suffix(".lock"), timeout=_LOCK_SECONDS):
            return _measure_again(path, target, entry, measure)
    except (OSError, filelock.Timeout) as error:
        _log.warning("the cost profile cannot be kept at %s: %s", path, error)
        return measure(target)


def _measure_again(
    path: Path, target: Target, seen: _Entry | None, measure: Callable[[Target], CostProfile]
) -> CostProfile:
    """Measure under the lock, unless somebody else did while we waited for it."""
    entry = _load(path, target, level=logging.WARNING)
    if entry is not None and (entry.settled or entry != seen):
        return entry.profile
    profile = measure(target)
    attempts = 1
    if entry is not None:
        attempts += entry.attempts
        profile = profile if profile.quiet else entry.profile.best_of(profile)
    record = {
        "format": _FORMAT,
        "key": _key(target),
        "attempts": attempts,
        "profile": profile.to_dict(),
    }
    write_atomically(path, json.dumps(record, indent=2))
    if not profile.quiet:
        _log.info("the cost profile was measured while something else used the cores")
    return profile


def _key(target: Target) -> dict[str, Any]:
    return {
        "machine": target.machine_fingerprint(),
        "torch": target.torch_version,
        "threads": target.threads,
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
    """Read an entry.

    Raises:
        CacheError: It is corrupt, of another format, or of another machine.
    """
    try:
        record = json.loads(text)
        if record["format"] != _FORMAT or record["key"] != _key(target):
            raise CacheError("it was written by another version or on another machine")
        profile = CostProfile.from_dict(record["profile"])
        attempts = int(record["attempts"])
    except (ValueError, KeyError, TypeError, OptionsError) as error:
        raise CacheError(f"it is corrupt: {error}") from error
    if (profile.machine, profile.threads) != (target.machine_fingerprint(), target.threads):
        raise CacheError("its profile is of another machine")
    return _Entry(profile, attempts)
