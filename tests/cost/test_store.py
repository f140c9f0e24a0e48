"""Profiles on disk: kept, shared, and made again when they cannot be trusted."""

from __future__ import annotations

import errno
import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.locks import refuse_locks

from qfuse import kernels
from qfuse.cost import CostProfile, load_or_measure, profile_path, store
from qfuse.targets import Target

TARGET = Target.for_testing()


class Meter:
    """Measures by taking the next of some profiles; counts how often it was asked."""

    def __init__(self, *profiles: CostProfile) -> None:
        self._profiles = list(profiles) or [profile()]
        self.asked = 0

    def __call__(self, target: Target) -> CostProfile:
        chosen = self._profiles[min(self.asked, len(self._profiles) - 1)]
        self.asked += 1
        return replace(chosen, machine=target.machine_fingerprint(), threads=target.threads)


def profile(**changes: Any) -> CostProfile:
    """A profile of the target, as if measured on a quiet machine."""
    return replace(CostProfile.pinned(), machine=TARGET.machine_fingerprint(), **changes)


def never(target: Target) -> CostProfile:
    raise AssertionError(f"measured {target.machine_fingerprint()}")


def test_measured_once_then_kept(tmp_path: Path) -> None:
    first = load_or_measure(TARGET, tmp_path, Meter(profile(f32_flops=7.0)))

    assert first.f32_flops == 7.0
    assert load_or_measure(TARGET, tmp_path, never) == first
    path = profile_path(TARGET, tmp_path)
    assert {p.name for p in path.parent.iterdir()} <= {path.name, path.with_suffix(".lock").name}


def test_a_network_drive_without_locks_keeps_profiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_locks(monkeypatch, errno.ENOLCK)
    first = load_or_measure(TARGET, tmp_path, Meter())

    assert load_or_measure(TARGET, tmp_path, never) == first


def test_the_variable_chooses_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFUSE_CACHE_DIR", str(tmp_path))

    load_or_measure(TARGET, measure=Meter())

    assert profile_path(TARGET) == profile_path(TARGET, tmp_path)
    assert profile_path(TARGET, tmp_path).is_file()


@pytest.mark.parametrize(
    "changes",
    [
        {"threads": 1},
        {"torch_version": "2.14.0"},
        {"features": frozenset({"avx2"})},
        {"mkldnn_enabled": False},
        {"model": "another"},
    ],
)
def test_each_machine_has_its_own(tmp_path: Path, changes: dict[str, Any]) -> None:
    other = Target.for_testing(**changes)
    meter = Meter()
    load_or_measure(TARGET, tmp_path, meter)
    load_or_measure(other, tmp_path, meter)

    assert meter.asked == 2
    assert profile_path(other, tmp_path) != profile_path(TARGET, tmp_path)


def test_the_compiler_makes_no_difference(tmp_path: Path) -> None:
    other = Target.for_testing(compiler=None)
    first = load_or_measure(TARGET, tmp_path, Meter(profile(f32_flops=7.0)))

    assert load_or_measure(other, tmp_path, never) == first
    assert profile_path(other, tmp_path) == profile_path(TARGET, tmp_path)


@pytest.mark.own_kernels
def test_other_sources_of_the_kernels_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = kernels.load()
    assert library.path is not None
    before = profile_path(TARGET, tmp_path)
    # A library is in a folder that is named after its sources, and has the name of the compiler.
    changed = library.path.parent.with_name("0" * 24) / library.path.name
    monkeypatch.setattr(kernels, "load", lambda: replace(library, path=changed))

    assert profile_path(TARGET, tmp_path) != before


def no_longer_json(record: dict[str, Any]) -> str:
    return json.dumps(record)[:-20]


def another_format(record: dict[str, Any]) -> str:
    return json.dumps(record | {"format": 0})


def another_machine(record: dict[str, Any]) -> str:
    return json.dumps(record | {"key": record["key"] | {"machine": "elsewhere"}})


def another_profile(record: dict[str, Any]) -> str:
    return json.dumps(record | {"profile": record["profile"] | {"machine": "elsewhere"}})


def other_threads(record: dict[str, Any]) -> str:
    return json.dumps(record | {"profile": record["profile"] | {"threads": 64}})


def impossible(record: dict[str, Any]) -> str:
    return json.dumps(record | {"profile": record["profile"] | {"memory_bandwidth": -1.0}})


def without_a_field(record: dict[str, Any]) -> str:
    del record["profile"]["int8_ops"]
    return json.dumps(record)


def without_attempts(record: dict[str, Any]) -> str:
    del record["attempts"]
    return json.dumps(record)


def empty(_: dict[str, Any]) -> str:
    return ""


def a_list(_: dict[str, Any]) -> str:
    return "[1]"


@pytest.mark.parametrize(
    "spoil",
    [
        no_longer_json,
        another_format,
        another_machine,
        another_profile,
        other_threads,
        impossible,
        without_a_field,
        without_attempts,
        empty,
        a_list,
    ],
)
def test_a_corrupt_or_foreign_entry_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[dict[str, Any]], str]
) -> None:
    load_or_measure(TARGET, tmp_path, Meter(profile(f32_flops=1.0)))
    path = profile_path(TARGET, tmp_path)
    path.write_text(spoil(json.loads(path.read_text())))

    with caplog.at_level(logging.WARNING):
        again = load_or_measure(TARGET, tmp_path, Meter(profile(f32_flops=2.0)))

    assert again.f32_flops == 2.0
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"the cost profile at {path} is measured again: it")
    assert load_or_measure(TARGET, tmp_path, never) == again


def test_bytes_that_are_no_text_are_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = profile_path(TARGET, tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\xff\xfe\x00")

    meter = Meter()
    load_or_measure(TARGET, tmp_path, meter)

    assert meter.asked == 1
    assert caplog.text.count("cannot be read") == 1
    load_or_measure(TARGET, tmp_path, never)


def test_where_nothing_can_be_kept_it_is_measured_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    meter = Meter()

    load_or_measure(TARGET, in_the_way, meter)
    load_or_measure(TARGET, in_the_way, meter)

    assert meter.asked == 2
    assert "cannot be kept" in caplog.text


def test_noise_is_measured_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    meter = Meter(
        profile(quiet=False, f32_flops=10.0, int8_ops=1.0),
        profile(quiet=False, f32_flops=1.0, int8_ops=20.0),
        profile(quiet=False, f32_flops=5.0, int8_ops=5.0),
        profile(f32_flops=99.0),
    )

    with caplog.at_level(logging.INFO):
        seen = [load_or_measure(TARGET, tmp_path, meter) for _ in range(5)]

    assert [p.f32_flops for p in seen] == [10.0] * 5
    assert [p.int8_ops for p in seen] == [1.0, 20.0, 20.0, 20.0, 20.0]
    # After three attempts it stays, so that the keys of compiled models do.
    assert meter.asked == 3
    assert caplog.text.count("under background load") == 3


def test_a_quiet_measurement_replaces_noisy_ones(tmp_path: Path) -> None:
    # Estimates from one thread can be too good as well, so they do not survive.
    meter = Meter(profile(quiet=False, f32_flops=100.0), profile(f32_flops=50.0))

    load_or_measure(TARGET, tmp_path, meter)

    assert load_or_measure(TARGET, tmp_path, meter) == profile(f32_flops=50.0)
    load_or_measure(TARGET, tmp_path, never)


def test_of_many_one_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = threading.Semaphore(0)
    original = store._load

    def counted(*args: Any, **kwargs: Any) -> Any:
        entry = original(*args, **kwargs)
        looked.release()
        return entry

    monkeypatch.setattr(store, "_load", counted)
    measuring, finish = threading.Event(), threading.Event()
    asked: list[Target] = []

    def slow(target: Target) -> CostProfile:
        asked.append(target)
        measuring.set()
        assert finish.wait(timeout=30)
        return profile(quiet=False)

    with ThreadPoolExecutor(max_workers=4) as pool:
        workers = [pool.submit(load_or_measure, TARGET, tmp_path, slow)]
        assert measuring.wait(timeout=30)
        workers += [pool.submit(load_or_measure, TARGET, tmp_path, slow) for _ in range(3)]
        # The first has looked twice, before and under the lock; the others once so far.
        for _ in range(5):
            assert looked.acquire(timeout=30)
        finish.set()

    # The profile is noisy, and still the others take what came while they waited.
    assert [worker.result() for worker in workers] == [profile(quiet=False)] * 4
    assert asked == [TARGET]
