"""A wrong rule is named, rolled back, and leaves a directory that runs alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tests.cases.package import NAME, write_package
from torch import nn
from torch.export import Dim

import qfuse
from qfuse.cases import read_case, rerun_case
from qfuse.cli import main
from qfuse.ir.errors import CaseError, OptionsError
from qfuse.ir.events import RolledBack
from qfuse.targets import Target

EAGER = {"backend": "eager", "own_kernels": False}


class Gate(nn.Module):
    """A linear, a tanh, and a buffer that counts calls."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        y: torch.Tensor = torch.tanh(self.linear(x)) * self.calls
        return y


@pytest.fixture
def wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the installed package of the wrong rule."""
    folder = write_package(tmp_path / "site")
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    sys.modules.pop("doubtful_rules", None)


def compiled(check: str, repro: Path | None, **more: Any) -> qfuse.CompiledModel:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(3))
    options = {**EAGER, "repro": repro}
    target = Target.for_testing(isa="portable")
    return qfuse.compile(Gate().eval(), (x,), options=options, check=check, target=target, **more)


def command_of(fast: qfuse.CompiledModel) -> Path:
    """The directory that the event of the roll-back names."""
    (event,) = fast.report.rolled_back
    assert event.rule == "scale-tanh"
    assert event.repro.startswith("qfuse repro ")
    return Path(event.repro.removeprefix("qfuse repro "))


def repro(folder: Path, site: Path | None) -> tuple[int, str]:
    """Run ``qfuse repro`` in a process of its own, with a package on its path or without."""
    paths = [p for p in sys.path if p and (site is None or p != str(site))]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(([str(site)] if site else []) + paths)}
    command = [sys.executable, "-m", "qfuse", "repro", str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("check", [pytest.param("site", marks=pytest.mark.thorough), "pipeline"])
def test_a_wrong_rule_leaves_a_directory_that_runs_alone(
    wrong: Path, tmp_path: Path, check: str
) -> None:
    fast = compiled(check, tmp_path / "kept")
    folder = command_of(fast)
    case = read_case(folder)
    assert (case.rule, case.origin, case.check) == ("scale-tanh", f"{NAME} 1.2", check)
    assert case.same_graph
    assert case.where.endswith("y: torch.Tensor = torch.tanh(self.linear(x)) * self.calls")
    assert (case.error or 0) > (case.allowed or 0) > 0
    assert case.written == ("calls",)

    if check == "pipeline":
        assert rerun_case(folder).reproduces
        return
    code, text = repro(folder, wrong)
    assert code == 1, text
    assert f"rule  scale-tanh (of {NAME} 1.2)" in text
    assert "error" in text.partition("now")[2]
    assert "allowed" in text.partition("now")[2]
    assert "the difference is still there" in text

    # The same directory with the rule repaired, and without its package.
    write_package(wrong, factor=1.0)
    code, text = repro(folder, wrong)
    assert code == 0, text
    assert "the rule fires 1 times and values match" in text
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    wrong.rename(tmp_path / "gone")
    code, text = repro(folder, elsewhere)
    assert code == 2, text
    assert f"the rule scale-tanh is of {NAME} 1.2, which is not installed" in text


def test_sizes_that_vary_and_strides_are_kept(wrong: Path, tmp_path: Path) -> None:
    del wrong
    x = torch.randn(8, 6).t()
    shapes = {"x": {0: Dim("rows", min=2, max=64)}}
    options = {**EAGER, "repro": tmp_path}
    fast = qfuse.compile(Gate().eval(), (x,), dynamic_shapes=shapes, options=options, check="site")
    folder = command_of(fast)
    case = read_case(folder)
    assert case.same_graph
    assert "s0" in (folder / "graph.txt").read_text()
    assert rerun_case(folder).reproduces


def test_nothing_is_written_unless_it_is_asked_for(
    wrong: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del wrong
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("QFUSE_REPRO", raising=False)
    before = set(tmp_path.iterdir())
    fast = compiled("site", None)
    (event,) = fast.report.rolled_back
    assert event.repro == "set QFUSE_REPRO=FOLDER to keep what reproduces it"
    assert set(tmp_path.iterdir()) == before
    monkeypatch.setenv("QFUSE_REPRO", str(tmp_path / "kept"))
    assert command_of(compiled("site", None)).parent == tmp_path / "kept"
    # Once more: the same case has the same directory.
    compiled("site", None)
    assert len(list((tmp_path / "kept").iterdir())) == 1


def test_a_folder_that_cannot_be_written_is_no_error(wrong: Path, tmp_path: Path) -> None:
    del wrong
    (tmp_path / "file").write_text("")
    fast = compiled("site", tmp_path / "file")
    (event,) = fast.plan.lowered.log.of(RolledBack)
    assert event.repro.startswith("it could not be written to")
    assert "repro" not in {p.name for p in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("file", "text", "word"),
    [
        ("case.json", None, "there is no case.json"),
        ("model.pt2", None, "there is no model.pt2"),
        ("case.json", "no", "cannot be read"),
        ("case.json", "{}", "is not of qfuse"),
        ("model.pt2", "no", "its files cannot be read"),
        ("inputs.safetensors", "no", "its files cannot be read"),
    ],
)
def test_a_bad_directory_is_told_with_code_2(
    wrong: Path, tmp_path: Path, file: str, text: str | None, word: str
) -> None:
    del wrong
    folder = command_of(compiled("site", tmp_path / "kept"))
    (folder / file).unlink()
    if text is not None:
        (folder / file).write_text(text)
    with pytest.raises(CaseError, match=word):
        rerun_case(folder)
    result = CliRunner().invoke(main, ["repro", str(folder)])
    assert result.exit_code == 2
    assert word in result.stderr


@pytest.mark.parametrize(("name", "value"), [("version", 2), ("error", "x"), ("strides", [1])])
def test_a_malformed_case_is_told(wrong: Path, tmp_path: Path, name: str, value: Any) -> None:
    del wrong
    folder = command_of(compiled("site", tmp_path / "kept"))
    data = json.loads((folder / "case.json").read_text())
    data[name] = value
    (folder / "case.json").write_text(json.dumps(data))
    with pytest.raises(CaseError, match=r"version 2|malformed"):
        read_case(folder)


def test_the_option_is_a_path() -> None:
    with pytest.raises(OptionsError, match="'repro' must be a path"):
        qfuse.Options(repro=3)  # type: ignore[arg-type]
