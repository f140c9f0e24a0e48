"""``qfuse compile -o``, and what is done with the file: ``run``, ``bench``, ``verify``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file
from torch import nn

import qfuse
from qfuse import kernels
from qfuse.cli import main, plugins, saved
from qfuse.saving import digest_of
from tests.test_cli import SMALL


def run(*args: object) -> Result:
    """Run the command line in this process."""
    return CliRunner().invoke(main, [str(arg) for arg in args])


class Counting(nn.Module):
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.register_buffer("calls", torch.tensor(0.0))

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> dict[str, Any]:
        self.calls += 1
        return {"y": self.fc(x) + shift, "calls": self.calls + 0, "rows": x.shape[0]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    fast = qfuse.compile(
        Counting().eval(),
        (torch.randn(2, 4),),
        {"shift": torch.ones(3)},
        options={"backend": "eager"},
    )
    fast.save(tmp_path / "counting.qfuse")
    return tmp_path / "counting.qfuse"


@pytest.mark.zoo
@pytest.mark.own_kernels
def test_compile_run_and_verify(tmp_path: Path) -> None:
    path = tmp_path / "bert.qfuse"
    done = run(
        "compile", "bert", *SMALL, "--size=seq=4", "--quantize=w8a8-dynamic", "--backend=eager",
        "-o", path,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert f"saved to {path}" in done.stderr
    fast = qfuse.load(path)
    assert fast.examples is not None
    args, kwargs = fast.examples
    done = run("run", path, "--json")
    assert done.exit_code == 0, done.output
    assert digest_of([fast(*args, **kwargs)[0]]) in {
        row["sha256"] for row in json.loads(done.stdout)
    }

    done = run("verify", path)
    assert done.exit_code == 0, done.output
    *lines, last = done.stdout.splitlines()
    names = kernels.load().instruction_sets
    assert [line.split()[1] for line in lines] == list(names)
    assert len({line.split()[0] for line in lines}) == 1
    assert last == f"{len(names)} path{'s' * (len(names) != 1)}, equal"


@pytest.mark.parametrize("option", ["--output", "--save-plan"])
def test_a_link_to_a_device_is_refused_before_the_model_is_loaded(
    tmp_path: Path, option: str
) -> None:
    (tmp_path / "link").symlink_to("/dev/null")
    done = run("compile", "no-such-model", option, tmp_path / "link")
    assert done.exit_code == 2
    assert "leads to /dev/null, a device" in done.stderr
    assert "do: name a file in a folder of your own" in done.stderr


def test_run_prints_what_the_model_returns(file: Path) -> None:
    done = run("run", file)
    assert done.exit_code == 0, done.output
    assert "['y']" in done.stdout
    assert "[2, 3]" in done.stdout
    assert "float32" in done.stdout
    # The file is not changed by a run, whose model counts its calls.
    assert run("run", file).stdout == done.stdout


def test_inputs_from_a_file(file: Path, tmp_path: Path) -> None:
    fast = qfuse.load(file)
    x = torch.randn(2, 4)
    save_file({"x": x}, tmp_path / "in.safetensors")
    done = run("run", file, "--inputs", tmp_path / "in.safetensors", "--json")
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["['y']"]["sha256"] == digest_of([fast(x, shift=torch.ones(3))["y"]])
    assert rows["['rows']"]["shape"] == "2"

    save_file({"z": x}, tmp_path / "in.safetensors")
    done = run("run", file, "--inputs", tmp_path / "in.safetensors")
    assert done.exit_code == 2
    assert "has 'z', which is not an input" in done.stderr
    assert "x, shift" in done.stderr
    (tmp_path / "in.safetensors").write_bytes(b"no tensors")
    done = run("run", file, "--inputs", tmp_path / "in.safetensors")
    assert done.exit_code == 2
    assert "cannot be read" in done.stderr


def test_a_file_without_inputs(tmp_path: Path) -> None:
    path = tmp_path / "large.qfuse"
    x = torch.zeros((1 << 22) + 1)
    qfuse.compile(nn.ReLU(), (x,), options={"backend": "eager"}, check="off").save(path)
    done = run("run", path)
    assert done.exit_code == 2
    assert "no example inputs" in done.stderr
    save_file({"input": x}, tmp_path / "in.safetensors")
    assert run("run", path, "--inputs", tmp_path / "in.safetensors").exit_code == 0
    save_file({}, tmp_path / "in.safetensors")
    done = run("run", path, "--inputs", tmp_path / "in.safetensors")
    assert "lacks 'input'" in done.stderr


def test_verify_without_own_kernels(file: Path) -> None:
    done = run("verify", file, "--json")
    assert done.exit_code == 0
    (name,) = json.loads(done.stdout)
    assert name == "torch"
    assert run("verify", file).stdout.endswith("1 path, equal\n")


def test_verify_finds_a_difference(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "digests_of", lambda *_: {"portable": "a" * 64, "avx2": "b" * 64})
    done = run("verify", file)
    assert done.exit_code == 1
    assert done.stdout.endswith("2 paths, not equal\n")


@pytest.mark.parametrize("installed", [True, False])
def test_bench_of_a_file(file: Path, monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    """With the package of the benchmarks, and without it."""
    if not installed:
        monkeypatch.setattr(plugins, "_installed", dict)
    monkeypatch.setattr(saved, "_SECONDS", 0.05)
    before = torch.get_num_threads()
    done = run("bench", file, "--threads", 1)
    assert done.exit_code == 0, done.output
    for words in ("median", "90th percentile", " ms", "threads", "eager"):
        assert words in done.stdout
    (row,) = [line for line in done.stdout.splitlines() if "threads" in line]
    assert row.split()[-2] == "1"
    assert torch.get_num_threads() == before


def test_bench_without_its_package_is_for_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "_installed", dict)
    done = run("bench", tmp_path / "missing")
    assert done.exit_code == 2
    assert "qfuse-bench" in done.stderr


@pytest.mark.parametrize("command", ["run", "verify", "bench"])
def test_errors_of_files(tmp_path: Path, command: str) -> None:
    done = run(command, tmp_path / "missing.qfuse")
    assert done.exit_code == 2
    assert "cannot be read" in done.stderr
    assert "Traceback" not in done.output


def test_a_file_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    done = run("compile", "bert", *SMALL, "-o", tmp_path / "no" / "m.qfuse")
    assert done.exit_code == 2
    assert "--output" in done.stderr
