"""Machines without a working compiler get a clear error, or run op by op and say so."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch
from tests.support.graphs.lowered import projection_graph

from qfuse.backends import BackendOptions, CompiledModule, compile_graph, toolchain
from qfuse.ir.errors import BackendError, OptionsError
from qfuse.ir.events import Noted
from qfuse.targets.compiler import Compiler


@pytest.fixture
def options(tmp_path: Path) -> BackendOptions:
    return BackendOptions(cache_folder=tmp_path / "cache")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "find_compiler", lambda: None)


@pytest.fixture
def broken_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that answers, but has lost its standard library."""
    script = tmp_path / "g++"
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "g++ 99.1" && exit 0\n'
        'echo "fatal error: vector: No such file" >&2\nexit 1\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(toolchain, "find_compiler", lambda: Compiler(str(script), "99.1"))


@pytest.mark.usefixtures("no_compiler")
def test_aoti_without_a_compiler_is_an_error(options: BackendOptions) -> None:
    with pytest.raises(BackendError, match=r"there is no C\+\+ compiler\n.*do: install g\+\+"):
        compile_graph(projection_graph(), backend="aoti", options=options)


@pytest.mark.usefixtures("broken_compiler")
def test_aoti_with_a_broken_compiler_is_an_error(options: BackendOptions) -> None:
    with pytest.raises(BackendError, match=r"does not work: .*vector: No such file"):
        compile_graph(projection_graph(), backend="aoti", options=options)


def test_a_killed_trial_is_not_remembered(
    options: BackendOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags that were not tried are not refused for good."""
    assert options.cache_folder is not None
    script = tmp_path / "g++"
    script.write_text("#!/bin/sh\nkill -KILL $$\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(toolchain, "find_compiler", lambda: Compiler(str(script), "99.1"))
    with pytest.raises(BackendError, match=r"does not work: .* killed.*\n.*do: free memory"):
        toolchain.check_toolchain(options.cache_folder)
    monkeypatch.setattr(toolchain, "try_compiler", lambda _compiler: None)
    monkeypatch.setattr("qfuse.backends._inductor_api.arch_flags", lambda: ("-mavx2",))
    with pytest.raises(BackendError, match=r"does not work: .* killed.*\n.*do: free memory"):
        toolchain.check_toolchain(options.cache_folder)
    assert not list(options.cache_folder.glob("*"))


@pytest.mark.usefixtures("no_compiler")
def test_auto_without_a_compiler_runs_op_by_op_and_says_so(options: BackendOptions) -> None:
    graph = projection_graph()
    runner = compile_graph(graph, backend="auto", options=options)
    rows = CompiledModule(graph.signature, runner)(torch.ones(2, 16), torch.tensor([0, 1]))

    assert runner.backend == "eager"
    assert rows[0].shape == (2, 2, 4)
    (note,) = graph.log.of(Noted)
    assert note.warn
    assert "there is no C++ compiler" in note.text


def test_the_trial_is_remembered(
    options: BackendOptions, needs_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    del needs_compiler
    assert options.cache_folder is not None
    first = toolchain.check_toolchain(options.cache_folder)
    monkeypatch.setattr(toolchain, "try_compiler", lambda _compiler: "tried again")
    monkeypatch.setattr(toolchain, "_accepts", lambda *_: pytest.fail("tried again"))

    assert toolchain.check_toolchain(options.cache_folder) == first


def test_a_compiler_that_does_not_know_the_flags_leaves_the_choice_to_inductor(
    options: BackendOptions, needs_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    del needs_compiler
    assert options.cache_folder is not None
    flags = ("-march=of-the-year-3000",)
    monkeypatch.setattr("qfuse.backends._inductor_api.arch_flags", lambda: flags)

    assert toolchain.check_toolchain(options.cache_folder) == {}


def test_refuses_an_unknown_backend() -> None:
    with pytest.raises(OptionsError, match="unknown backend 'cuda'"):
        compile_graph(projection_graph(), backend="cuda")


def test_refuses_no_runners() -> None:
    with pytest.raises(OptionsError, match="runners must be at least 1"):
        BackendOptions(runners=0)
