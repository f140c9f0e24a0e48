"""The compiler is the one that Inductor would take."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest
from tests.support.static_cpp import has_static_libstdcxx

from qfuse.targets.compiler import Compiler, CompilerFault, find_compiler, try_compiler


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An otherwise empty PATH, no CXX, and Inductor not loaded."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delitem(sys.modules, "torch._inductor.config", raising=False)
    return tmp_path


def make(folder: Path, name: str, script: str) -> Path:
    """An executable that runs a shell script."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def inductor_lists(monkeypatch: pytest.MonkeyPatch, cxx: object) -> None:
    """Pretend that Inductor is loaded and that its config says this."""
    config = types.ModuleType("torch._inductor.config")
    vars(config)["cpp"] = types.SimpleNamespace(cxx=cxx)
    monkeypatch.setitem(sys.modules, "torch._inductor.config", config)


def test_none(tools: Path) -> None:
    assert list(tools.iterdir()) == []
    assert find_compiler() is None


def test_the_default(tools: Path) -> None:
    path = make(tools, "g++", "echo 'g++ (Somebody 12.1.0) 12.2.0'; echo more")

    found = find_compiler()

    assert found == Compiler(str(path), "g++ (Somebody 12.1.0) 12.2.0")
    assert found.number == "12.2.0"


def test_the_environment_goes_before_the_default(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tools, "g++", "echo g++ 12.2.0")
    other = make(tools, "clang++-18", "echo clang version 18.1")
    monkeypatch.setenv("CXX", "clang++-18")

    found = find_compiler()

    assert found is not None
    assert (found.path, found.number) == (str(other), "18.1")


def test_what_inductor_was_told_goes_before_the_environment(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tools, "g++", "echo g++ 12.2.0")
    other = make(tools, "g++-14", "echo g++-14 14.1.0")
    monkeypatch.setenv("CXX", "g++")

    inductor_lists(monkeypatch, (None, "g++-14"))
    assert find_compiler() == Compiler(str(other), "g++-14 14.1.0")
    inductor_lists(monkeypatch, "g++-14")
    assert find_compiler() == Compiler(str(other), "g++-14 14.1.0")
    inductor_lists(monkeypatch, ("missing", "g++-14"))
    assert find_compiler() == Compiler(str(other), "g++-14 14.1.0")


def test_one_that_does_not_run_is_none(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tools, "g++", "exit 1")
    assert find_compiler() is None
    # Inductor takes the variable as one executable, so this is none for it either.
    monkeypatch.setenv("CXX", "ccache g++")
    assert find_compiler() is None


def test_the_version_is_asked_once_per_state_of_the_file(tools: Path) -> None:
    count = tools / "count"
    path = make(tools, "g++", f"echo asked >> {count}; echo g++ 12.2.0")
    assert find_compiler() == find_compiler()
    assert count.read_text().splitlines() == ["asked"]

    path.write_text(path.read_text().replace("12.2.0", "13.1.0"))
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))

    found = find_compiler()
    assert found is not None
    assert found.number == "13.1.0"


def test_a_version_without_a_number() -> None:
    assert Compiler("cc", "cc: nightly").number == ""


def test_the_compiler_of_this_machine_builds() -> None:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("needs a C++ compiler")

    assert try_compiler(compiler) is None


def test_a_compiler_that_copies_its_standard_library_is_refused(tmp_path: Path) -> None:
    """Its kernels end the process at the first error that they raise."""
    compiler = find_compiler()
    if compiler is None or not has_static_libstdcxx(compiler.path):
        pytest.skip("needs a C++ compiler with libstdc++.a")
    static = make(tmp_path, "g++", f'exec {compiler.path} -static-libstdc++ "$@"')

    fault = try_compiler(Compiler(str(static), compiler.version))

    assert fault is not None
    assert fault.what.startswith("it links a copy of libstdc++")
    assert "-static-libstdc++" in fault.fix


def test_what_a_broken_compiler_says(tools: Path) -> None:
    script = "echo 'In file included from x:' >&2; echo 'omp.h: fatal error: no' >&2; exit 1"

    said = try_compiler(Compiler(str(make(tools, "g++", script)), "g++ 1.0"))
    assert said is not None
    assert said.what == "omp.h: fatal error: no"
    assert try_compiler(Compiler(str(make(tools, "silent", "exit 3")), "")) == CompilerFault(
        "failed"
    )
    killed = try_compiler(Compiler(str(make(tools, "killed", "kill -KILL $$")), ""))
    assert killed is not None
    assert "was killed" in killed.what
    assert killed.fix.startswith("free memory")
    gone = try_compiler(Compiler(str(tools / "gone"), ""))
    assert gone is not None
    assert "No such file" in gone.what
