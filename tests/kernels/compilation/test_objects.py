"""Which object files a build uses again, and which it compiles."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from qfuse.kernels.build import build
from qfuse.kernels.compilation.compiler import (
    KernelBuildError,
    KernelCompiler,
)
from qfuse.kernels.compilation.objects import ObjectCache

FLAGS = ("-O2",)


@pytest.fixture
def cache(tmp_path: Path) -> ObjectCache:
    sources = tmp_path / "csrc"
    (sources / "part").mkdir(parents=True)
    (sources / "part" / "one.cpp").write_text(
        '#include "part/deep.h"\n#include <vector>\nint one;\n'
    )
    (sources / "two.cpp").write_text("int two;\n")
    (sources / "part" / "deep.h").write_text('#include "near.h"\n')
    (sources / "part" / "near.h").write_text("int near;\n")
    return ObjectCache(tmp_path / "objects", sources, "g++ 12")


def compiled(cache: ObjectCache, name: str, log: list[str], flags: tuple[str, ...] = FLAGS) -> Path:
    def compile_to(path: Path) -> None:
        log.append(name)
        path.write_text(name)

    return cache.compiled(cache.sources / name, flags, compile_to)


def test_an_object_is_compiled_once(cache: ObjectCache) -> None:
    log: list[str] = []
    first = compiled(cache, "part/one.cpp", log)
    assert compiled(cache, "part/one.cpp", log) == first
    assert first.read_text() == "part/one.cpp"
    assert log == ["part/one.cpp"]
    assert [path.name for path in cache.folder.iterdir()] == [first.name]


def test_a_header_that_a_header_includes_counts_for_its_sources_only(cache: ObjectCache) -> None:
    log: list[str] = []
    for name in ("part/one.cpp", "two.cpp"):
        compiled(cache, name, log)
    (cache.sources / "part" / "near.h").write_text("int other;\n")
    for name in ("part/one.cpp", "two.cpp"):
        compiled(cache, name, log)
    assert log == ["part/one.cpp", "two.cpp", "part/one.cpp"]


@pytest.mark.parametrize("what", ["flags", "compiler", "torch"])
def test_what_decides_the_code_decides_the_object(
    cache: ObjectCache, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = cache.sources / "two.cpp"
    before = cache.path(source, FLAGS)
    flags = FLAGS
    match what:
        case "flags":
            flags = ("-O3",)
        case "compiler":
            cache = ObjectCache(cache.folder, cache.sources, "clang 14")
        case _:
            monkeypatch.setattr("torch.__version__", "0.0")
    assert cache.path(source, flags) != before


def test_a_failure_leaves_nothing(cache: ObjectCache) -> None:
    def fails(path: Path) -> None:
        path.write_text("half")
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        cache.compiled(cache.sources / "two.cpp", FLAGS, fails)
    assert not list(cache.folder.iterdir())


def test_what_no_build_used_for_long_is_removed(cache: ObjectCache) -> None:
    log: list[str] = []
    old, new = compiled(cache, "part/one.cpp", log), compiled(cache, "two.cpp", log)
    long_ago = time.time() - 31 * 24 * 3600
    os.utime(old, (long_ago, long_ago))
    cache.remove_old()
    assert not old.exists()
    assert new.exists()


def test_a_build_that_fails_keeps_what_it_compiled(
    compiler: KernelCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QFUSE_CACHE_DIR", str(tmp_path / "cache"))
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "a.cpp").write_text("int a() { return 1; }\n")
    (sources / "b.cpp").write_text("int b() { return one; }\n")
    with pytest.raises(KernelBuildError, match="one"):
        build(compiler, sources=sources)
    objects = tmp_path / "cache" / "kernels" / "objects"
    (kept,) = objects.iterdir()
    written = kept.stat().st_ino

    (sources / "b.cpp").write_text("int b() { return 1; }\n")
    library, _ = build(compiler, sources=sources)
    assert library.exists()
    assert len(list(objects.iterdir())) == 2
    assert kept.stat().st_ino == written


def test_objects_that_do_not_link_are_not_kept(
    compiler: KernelCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QFUSE_CACHE_DIR", str(tmp_path / "cache"))
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "a.cpp").write_text("int same() { return 1; }\n")
    (sources / "b.cpp").write_text("int same() { return 2; }\n")
    with pytest.raises(KernelBuildError):
        build(compiler, sources=sources)
    assert not list((tmp_path / "cache" / "kernels" / "objects").iterdir())
