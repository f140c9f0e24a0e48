"""The cache of compiled libraries: who may find what there, and what is rebuilt."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import filelock
import pytest
import torch
from tests.support.locks import refuse_locks
from tests.support.processes import run_python

from qfuse.ir.errors import OptionsError
from qfuse.kernels import (
    KernelBuildError,
    KernelCompiler,
    KernelLibrary,
    copy_library,
    find_kernel_compiler,
    kernel_cache,
    read_description,
)
from qfuse.kernels.build import build

SOURCE = 'extern "C" int answer() { return %d; }\n'


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small library, and an empty cache to build it into."""
    monkeypatch.setenv("QFUSE_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "answer.cpp").write_text(SOURCE % 1)
    return folder


def executable(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_second_build_is_found(compiler: KernelCompiler, sources: Path) -> None:
    first, compiled = build(compiler, sources=sources)
    second, again = build(compiler, sources=sources)

    assert compiled
    assert not again
    assert first == second
    assert first.is_relative_to(kernel_cache())
    assert sorted(p.suffix for p in first.parent.iterdir()) == ["", ".json", ".so"]


def test_other_sources_are_another_entry(compiler: KernelCompiler, sources: Path) -> None:
    first, _ = build(compiler, sources=sources)
    (sources / "answer.cpp").write_text(SOURCE % 2)
    second, compiled = build(compiler, sources=sources)

    assert compiled
    assert first != second
    assert first.exists()


def test_another_torch_is_another_entry(
    compiler: KernelCompiler, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = build(compiler, sources=sources)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    second, compiled = build(compiler, sources=sources)

    assert compiled
    assert first.parent != second.parent


def test_another_compiler_is_another_library(compiler: KernelCompiler, sources: Path) -> None:
    first, _ = build(compiler, sources=sources)
    second, compiled = build(KernelCompiler(compiler.command, "another version"), sources=sources)

    assert compiled
    assert first != second
    assert first.parent == second.parent


def test_without_a_compiler_any_cached_library_serves(
    compiler: KernelCompiler, sources: Path
) -> None:
    with pytest.raises(KernelBuildError, match=r"no C\+\+ compiler") as error:
        build(None, sources=sources)
    assert "CXX" in str(error.value)

    first, _ = build(compiler, sources=sources)

    assert build(None, sources=sources) == (first, False)


def spoil_bytes(library: Path) -> None:
    library.write_bytes(library.read_bytes()[:-100])


def spoil_description(library: Path) -> None:
    library.with_suffix(".json").write_text("{")


def lose_description(library: Path) -> None:
    library.with_suffix(".json").unlink()


def describe_another(library: Path) -> None:
    path = library.with_suffix(".json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "key": "0" * 64}))


@pytest.mark.parametrize(
    "spoil", [spoil_bytes, spoil_description, lose_description, describe_another]
)
def test_a_corrupt_or_foreign_library_is_rebuilt(
    compiler: KernelCompiler, sources: Path, spoil: object, caplog: pytest.LogCaptureFixture
) -> None:
    assert callable(spoil)
    first, _ = build(compiler, sources=sources)
    good = first.read_bytes()
    spoil(first)
    caplog.clear()

    with caplog.at_level(logging.WARNING, logger="qfuse"):
        second, compiled = build(compiler, sources=sources)

    assert compiled
    assert first == second
    assert second.read_bytes() == good
    why, what = caplog.messages
    assert "is rebuilt" in why
    assert what.startswith("compiling qfuse's kernels")


def test_what_the_compiler_said_is_reported(compiler: KernelCompiler, sources: Path) -> None:
    (sources / "answer.cpp").write_text("int answer() { return nothing; }\n")

    with pytest.raises(KernelBuildError, match="nothing") as error:
        build(compiler, sources=sources)

    assert compiler.command[0] in (error.value.where or "")
    assert [p for p in kernel_cache().rglob("*") if p.suffix in {".so", ".o"}] == []


def test_a_cache_that_cannot_be_written(
    compiler: KernelCompiler, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QFUSE_CACHE_DIR", str(tmp_path / "file"))

    with pytest.raises(KernelBuildError, match="cache cannot be used") as error:
        build(compiler, sources=sources)

    assert "QFUSE_CACHE_DIR" in str(error.value)


def test_a_cache_that_is_read_only_serves(
    compiler: KernelCompiler, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = build(compiler, sources=sources)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("read-only file system")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)

    assert build(compiler, sources=sources) == (first, False)
    with pytest.raises(KernelBuildError, match="read-only"):
        build(compiler, sources=sources, rebuild=True)


def test_a_cache_on_a_network_drive_without_locks(
    compiler: KernelCompiler, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_locks(monkeypatch, errno.ENOLCK)
    first, _ = build(compiler, sources=sources)
    assert build(compiler, sources=sources) == (first, False)


def test_builds_at_the_same_time_compile_once(sources: Path, tmp_path: Path) -> None:
    found = find_kernel_compiler()
    if found is None:
        pytest.skip("needs a C++ compiler")
    calls = tmp_path / "calls"
    counting = executable(tmp_path / "c++", f'echo x >> {calls}\nexec {found.command[0]} "$@"')
    compiler = KernelCompiler((str(counting),), "counting")

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: build(compiler, sources=sources), range(4)))

    assert len({path for path, _ in results}) == 1
    assert sorted(compiled for _, compiled in results) == [False, False, False, True]
    assert calls.read_text().count("x") == 2  # one source, one link


class TestPrebuilt:
    """Libraries that came with the package."""

    @pytest.fixture
    def prebuilt(self, compiler: KernelCompiler, sources: Path, tmp_path: Path) -> Path:
        """A folder with a library of the sources, and an empty cache."""
        built, _ = build(compiler, sources=sources)
        copied = copy_library(built, tmp_path / "prebuilt")
        shutil.rmtree(kernel_cache())

        assert read_description(copied).compiler == compiler.version
        return tmp_path / "prebuilt"

    def test_one_that_fits_needs_neither_compiler_nor_cache(
        self, sources: Path, prebuilt: Path
    ) -> None:
        found, compiled = build(None, sources=sources, prebuilt=prebuilt)

        assert found.is_relative_to(prebuilt)
        assert not compiled
        assert not kernel_cache().exists()

    def test_it_is_taken_before_the_cache(
        self, compiler: KernelCompiler, sources: Path, prebuilt: Path
    ) -> None:
        build(compiler, sources=sources)

        found, _ = build(compiler, sources=sources, prebuilt=prebuilt)

        assert found.is_relative_to(prebuilt)

    def test_one_of_other_sources_is_not_looked_at(self, sources: Path, prebuilt: Path) -> None:
        (sources / "answer.cpp").write_text(SOURCE % 2)

        with pytest.raises(KernelBuildError, match=r"no C\+\+ compiler"):
            build(None, sources=sources, prebuilt=prebuilt)

    def test_one_for_another_torch_is_not_looked_at(
        self, sources: Path, prebuilt: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch, "__version__", "2.99.0")

        with pytest.raises(KernelBuildError, match=r"no C\+\+ compiler"):
            build(None, sources=sources, prebuilt=prebuilt)

    def test_a_corrupt_one_is_told_and_built_anew(
        self,
        compiler: KernelCompiler,
        sources: Path,
        prebuilt: Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        (library,) = prebuilt.rglob("*.so")
        spoil_bytes(library)

        with caplog.at_level(logging.WARNING, logger="qfuse"):
            found, compiled = build(compiler, sources=sources, prebuilt=prebuilt)

        assert compiled
        assert found.is_relative_to(kernel_cache())
        assert "is rebuilt" in caplog.text

    def test_a_folder_that_cannot_be_written_to(
        self, compiler: KernelCompiler, sources: Path, tmp_path: Path
    ) -> None:
        built, _ = build(compiler, sources=sources)
        (tmp_path / "file").touch()

        with pytest.raises(KernelBuildError, match="cannot be copied"):
            copy_library(built, tmp_path / "file")


class TestSanitizers:
    def test_they_are_another_entry(
        self, compiler: KernelCompiler, sources: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain, _ = build(compiler, sources=sources)
        monkeypatch.setenv("QFUSE_SANITIZE", "undefined")
        checked, compiled = build(compiler, sources=sources)

        assert compiled
        assert plain.parent != checked.parent

    def test_one_that_does_not_exist_is_refused(
        self, compiler: KernelCompiler, sources: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("QFUSE_SANITIZE", "address,luck")

        with pytest.raises(OptionsError, match="'luck'"):
            build(compiler, sources=sources)


class TestFindCompiler:
    def test_cxx_is_taken_with_its_arguments(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = executable(tmp_path / "mine", "echo mine 7.1")
        monkeypatch.setenv("CXX", f"{path} -pipe")

        assert find_kernel_compiler() == KernelCompiler((str(path), "-pipe"), "mine 7.1")

    def test_a_cxx_that_does_not_work_is_not_replaced(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CXX", str(executable(tmp_path / "broken", "exit 1")))

        assert find_kernel_compiler() is None

    @pytest.mark.parametrize("name", ["g++", "clang++"])
    def test_either_compiler_is_found(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
        echo = shutil.which("echo", path=os.defpath) or "/bin/echo"
        path = executable(tmp_path / name, f"{echo} {name} 1.0")

        assert find_kernel_compiler() == KernelCompiler((str(path),), f"{name} 1.0")

    def test_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))

        assert find_kernel_compiler() is None


@pytest.mark.slow
class TestProcess:
    def test_importing_builds_and_loads_nothing(self, tmp_path: Path) -> None:
        done = run_python(
            "import qfuse.kernels, torch; print(hasattr(torch.ops.qfuse, 'linear_w8a8'))",
            QFUSE_CACHE_DIR=str(tmp_path),
        )

        assert (done.stdout, done.stderr, done.returncode) == ("False\n", "", 0)
        assert list(tmp_path.iterdir()) == []

    def test_without_a_compiler_there_is_a_reason(self, tmp_path: Path) -> None:
        done = run_python(
            "from qfuse import kernels; l = kernels.load(); print(l.available, l.reason)",
            QFUSE_CACHE_DIR=str(tmp_path),
            CXX="no-such-compiler",
        )

        assert done.returncode == 0, done.stderr
        assert re.match(r"False no C\+\+ compiler was found", done.stdout)

    @pytest.mark.thorough
    def test_a_compiler_that_fails_is_told(self, tmp_path: Path) -> None:
        broken = executable(tmp_path / "c++", '[ "$1" = --version ] && echo broken 1 || exit 1')
        for compiler in ("/bin/false", str(broken)):
            done = run_python(
                "from qfuse import kernels; l = kernels.load(); print(l.available, l.reason)",
                QFUSE_CACHE_DIR=str(tmp_path / "cache"),
                CXX=compiler,
            )

            assert done.returncode == 0, done.stderr
            assert re.match(r"False .*(compiler failed|no C\+\+ compiler)", done.stdout)

    @pytest.mark.thorough
    def test_a_library_that_is_loaded_already_is_taken(self, library: KernelLibrary) -> None:
        done = run_python(
            f"import torch; torch.ops.load_library({str(library.path)!r}); "
            "from qfuse import kernels; l = kernels.load(); print(l.available, l.path)",
            CXX="no-such-compiler",
        )

        assert done.stdout == "True None\n", done.stderr

    def test_the_environment_chooses_the_instruction_set(self) -> None:
        code = (
            "import torch; from qfuse import kernels; kernels.load(); "
            "print(torch.ops.qfuse.chosen_kernels())"
        )
        chosen = run_python(code, QFUSE_ISA="portable")
        wrong = run_python(code, QFUSE_ISA="mmx")

        assert chosen.stdout == "portable\n", chosen.stderr
        assert "OptionsError" in wrong.stderr
        assert "'mmx'" in wrong.stderr
        assert "portable" in wrong.stderr
