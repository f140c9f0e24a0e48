"""In other processes: without a compiler and the model's packages, on full disks, killed half way."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.architecture.source import ROOT
from torch import nn

import qfuse
from qfuse import zoo
from qfuse.ir.signature._tree_api import flat_leaves
from qfuse.zoo import recipes

pytestmark = pytest.mark.slow

# No compiler, no cache, and no package that the model came from.
DEPLOYED = """
import os, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torchao", "transformers") or name.startswith("torch._inductor"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocked())
import torch, qfuse
from safetensors.torch import save_file
fast = qfuse.load(sys.argv[1])
args, kwargs = fast.examples
out = fast(*args, **kwargs)
assert not {"torchao", "transformers", "torch._inductor"} & set(sys.modules)
save_file({name: value.contiguous() for name, value in zip(out._fields, out)}, sys.argv[2])
print(fast.backend, type(out).__name__, [note.text for note in fast.report.notes])
"""


def run(script: str, *args: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment},
    )


@pytest.mark.zoo
@pytest.mark.own_kernels
@pytest.mark.compiler
def test_a_process_without_compiler_and_packages(tmp_path: Path) -> None:
    built = zoo.build(
        "bert", layers=1, hidden=64, intermediate=128, vocab=97, heads=4, seq=6, batch=2
    )
    quantized = recipes.quantize(built.module, "w8a8-dynamic", built.args, built.kwargs)
    fast = qfuse.compile(quantized.model, built.args, built.kwargs)
    assert fast.report.fused
    path, results = tmp_path / "bert.qfuse", tmp_path / "results.safetensors"
    fast.save(path)
    away = str(tmp_path / "nothing")
    done = run(DEPLOYED, path, results, PATH="", CXX="", QFUSE_CACHE_DIR=away, HOME=away)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{fast.backend} BaseModelOutput")
    assert "is a named tuple" in done.stdout
    have = load_file(results)
    want = fast(*built.args, **dict(built.kwargs or {}))
    assert list(have) == list(want)
    assert all(map(torch.equal, have.values(), flat_leaves(want)))
    assert not Path(away).exists()


@pytest.mark.thorough
@pytest.mark.own_kernels
@pytest.mark.compiler
def test_blocks_of_a_float_model_bring_the_kernels_that_run_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QFUSE_BLOCKS", "on")
    layers = (m for _ in range(4) for m in (nn.Linear(16, 16), nn.Tanh()))
    model, x = nn.Sequential(*layers).eval(), torch.randn(2, 16)
    fast = qfuse.compile(model, (x,))
    assert any("repeats a block" in note.text for note in fast.report.notes)
    path, results = tmp_path / "model.qfuse", tmp_path / "results.safetensors"
    fast.save(path)
    done = run(FLOAT_RUN, path, results, QFUSE_CACHE_DIR=str(tmp_path / "nothing"))

    assert done.returncode == 0, done.stderr
    assert torch.equal(load_file(results)["y"], fast(x))


FLOAT_RUN = """
import sys, qfuse
from safetensors.torch import save_file
fast = qfuse.load(sys.argv[1])
args, kwargs = fast.examples
save_file({"y": fast(*args, **kwargs)}, sys.argv[2])
"""

COMPILE = """
import os, resource, sys, torch, qfuse
from torch import nn
from qfuse.cost import CostProfile
qfuse.session.load_or_measure = lambda target, **_: CostProfile.pinned()
if len(sys.argv) > 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), torch.randn(3, 8)
fast = qfuse.compile(model, (x,), options={"own_kernels": False})
assert torch.allclose(fast(x), model(x))
print(fast.backend, [note.text for note in fast.report.notes])
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with 200 KB, where they can be made."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200K", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("file systems cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.thorough
@pytest.mark.compiler
def test_a_full_cache_does_not_end_the_process(small_disk: Path) -> None:
    """Torch's writer of packages did: its destructor throws after a failed write."""
    done = run(COMPILE, QFUSE_CACHE_DIR=str(small_disk))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("aoti")
    assert "No space left" in done.stderr
    assert not [path for path in small_disk.rglob("*") if path.name.startswith(".new-")]


@pytest.mark.thorough
@pytest.mark.compiler
def test_a_full_disk_runs_op_by_op(tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    where = {name: str(tmp_path / "temporary") for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR")}
    done = run(COMPILE, 20_000, QFUSE_CACHE_DIR=str(tmp_path / "cache"), **where)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("eager")
    assert "runs op by op" in done.stdout


@pytest.mark.thorough
@pytest.mark.compiler
@pytest.mark.parametrize("limit", [20_000, 1_000_000])
def test_a_limit_of_file_sizes_runs_op_by_op(tmp_path: Path, limit: int) -> None:
    """Python cannot write so much, or the compiler cannot: a signal ends it."""
    (tmp_path / "temporary").mkdir()
    where = {name: str(tmp_path / "temporary") for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR")}
    done = run(COMPILE, limit, QFUSE_CACHE_DIR=str(tmp_path / "cache"), **where)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("eager")
    assert f"larger than the limit of {limit / 1e6:g} MB for files of this process" in done.stdout
    assert "ulimit -f unlimited" in done.stdout
    assert "report the graph" not in done.stdout


@pytest.mark.compiler
@pytest.mark.parametrize(
    "at_the_model",
    [
        "kill -KILL $$",
        pytest.param(
            "echo 'g++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_killed_compiler_runs_op_by_op(tmp_path: Path, at_the_model: str) -> None:
    """The compiler works, until it compiles a file of Inductor."""
    script = tmp_path / "cxx"
    trial = 'case "$*" in *--version*|*trial.*) exec g++ "$@";; esac'
    script.write_text(f"#!/bin/sh\n{trial}\n{at_the_model}\n")
    script.chmod(0o755)
    folders = {
        name: str(tmp_path / name) for name in ("QFUSE_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    }
    done = run(COMPILE, CXX=str(script), **folders)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("eager")
    assert "the C++ compiler was killed, as it is where memory runs out" in done.stdout
    assert "do: free memory" in done.stdout
    assert "report the graph" not in done.stdout


@pytest.mark.thorough
@pytest.mark.compiler
def test_a_home_that_cannot_be_written() -> None:
    environment = dict.fromkeys(("XDG_CACHE_HOME", "QFUSE_CACHE_DIR"), "")
    done = run(COMPILE, HOME="/dev/null/home", **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("aoti")
    assert "compiling without the cache" in done.stderr


def test_a_save_that_was_killed(tmp_path: Path) -> None:
    script = (
        "import os, sys, torch, qfuse\n"
        "from qfuse.saving import container\n"
        "def kill(*_): os.kill(os.getpid(), 9)\n"
        "container.os.fsync = kill\n"
        "fast = qfuse.compile(torch.nn.ReLU(), (torch.ones(3),), options={'backend': 'eager'})\n"
        "fast.save(sys.argv[1])\n"
    )
    path = tmp_path / "model.qfuse"
    assert run(script, path).returncode == -9
    assert not path.exists()
    (left,) = tmp_path.iterdir()
    os.utime(left, (0, 0))
    fast = qfuse.compile(nn.ReLU(), (torch.ones(3),), options={"backend": "eager"})
    fast.save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["model.qfuse"]
