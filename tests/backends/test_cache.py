"""The package cache: hits, and entries that would crash the process are rebuilt with a log line."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.backends.conftest import Pair
from tests.support.locks import refuse_locks

from qfuse.backends import BackendOptions, CompiledModule, _inductor_api, compile_graph
from qfuse.backends import cache as cache_module
from qfuse.backends import compiler as compiler_module
from qfuse.backends.cache import CompiledCode, PackageCache
from qfuse.backends.toolchain import isa_runs_here
from qfuse.ir.errors import BackendError
from qfuse.ir.events import Noted
from qfuse.kernels.compilation.scratch import scratch_folder


class Compiler:
    """Stands in for Inductor: gives the package of an entry that was made before, and counts."""

    def __init__(self, entry: Path) -> None:
        self.calls = 0
        self._entry = entry
        self._manifest = json.loads((entry / "manifest.json").read_text())

    def __call__(
        self,
        module: torch.fx.GraphModule,
        examples: Sequence[torch.Tensor],
        patches: Mapping[str, Any],
        ranges: Mapping[str, Any],
    ) -> _inductor_api.Compiled:
        del examples, patches, ranges
        self.calls += 1
        package = (self._entry / "model.pt2").read_bytes()
        constants = {
            name: value.detach()
            for name, value in module.named_parameters()
            if name not in self._manifest["baked"]
        }
        extras = load_file(self._entry / "extras.safetensors")
        conditions = tuple(self._manifest["conditions"])
        return _inductor_api.Compiled(package, {**constants, **extras}, conditions)


@pytest.fixture
def entry(projection: Pair, cache_folder: Path, tmp_path: Path) -> Path:
    """A copy of the entry of the projection graph, in a cache of its own."""
    del projection
    (made,) = (cache_folder / "projection").glob("*/*/manifest.json")
    place = tmp_path / "cache" / made.parent.parent.name / made.parent.name
    shutil.copytree(made.parent, place)
    for stamp in (cache_folder / "projection").glob("compiler-*"):
        shutil.copy(stamp, tmp_path / "cache")
    return place


@pytest.fixture
def compiler(entry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    sound = tmp_path / "sound"
    shutil.copytree(entry, sound)
    compiler = Compiler(sound)
    monkeypatch.setattr(_inductor_api, "compile_package", compiler)
    return compiler


def run_again(pair: Pair, entry: Path, **options: Any) -> None:
    """Compile the projection graph with the cache of ``entry``, and see that it is right."""
    folder = entry.parent.parent
    chosen = BackendOptions(cache_folder=folder, **options)
    runner = compile_graph(pair.graph, backend="aoti", options=chosen)
    fast = CompiledModule(pair.graph.signature, runner)
    x, ids = torch.randn(3, 16), torch.tensor([1, 2, 3])
    torch.testing.assert_close(fast(x, ids), pair.plain(x, ids))


def test_a_hit_compiles_nothing(
    projection: Pair, entry: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "qfuse")
    run_again(projection, entry)

    assert compiler.calls == 0
    assert not caplog.records


def test_versions_of_qfuse_share_a_cache(
    projection: Pair, entry: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(compiler_module, "package_digest", lambda: "another version")
        run_again(projection, entry)
        assert compiler.calls == 1
        run_again(projection, entry)
    run_again(projection, entry)
    assert compiler.calls == 1
    assert len(list(entry.parent.parent.glob("*/*/manifest.json"))) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"fingerprint": "another machine"},
        {"kernels": "another library"},
        {"inductor": {"cpp.simdlen": 256}},
        {"cache": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_decides_the_code_is_in_the_key(
    projection: Pair, entry: Path, compiler: Compiler, options: dict[str, Any]
) -> None:
    run_again(projection, entry, **options)
    assert compiler.calls == 1


def edit_manifest(entry: Path, **changes: Any) -> None:
    manifest = json.loads((entry / "manifest.json").read_text())
    (entry / "manifest.json").write_text(json.dumps({**manifest, **changes}))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated package": (lambda e: truncate(e / "model.pt2"), "model.pt2 is not the file"),
    "one bit of the package": (lambda e: flip_a_bit(e / "model.pt2"), "model.pt2 is not the file"),
    "no package": (lambda e: (e / "model.pt2").unlink(), "is unreadable"),
    "no manifest": (lambda e: (e / "manifest.json").unlink(), "is unreadable"),
    "truncated manifest": (lambda e: truncate(e / "manifest.json"), "is unreadable"),
    "a list as manifest": (lambda e: (e / "manifest.json").write_text("[]"), "is unreadable"),
    "empty manifest": (lambda e: (e / "manifest.json").write_text("{}"), "is unreadable"),
    "truncated extras": (lambda e: truncate(e / "extras.safetensors"), "extras.safetensors is not"),
    "another format": (lambda e: edit_manifest(e, format=0), "another format"),
    "another program": (lambda e: edit_manifest(e, key="0" * 64), "another format or program"),
    "another CPU": (lambda e: edit_manifest(e, isa="AVX1024 AMX_NEXT"), "compiled for another CPU"),
    "another value": (lambda e: edit_manifest(e, baked={"c0": "0"}), "c0 was compiled in"),
    "another constant": (lambda e: edit_manifest(e, baked={"c99": "0"}), "c99 was compiled in"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_bad_entry_is_rebuilt(
    projection: Pair,
    entry: Path,
    compiler: Compiler,
    caplog: pytest.LogCaptureFixture,
    damage: str,
) -> None:
    harm, message = DAMAGE[damage]
    harm(entry)
    run_again(projection, entry)

    assert compiler.calls == 1
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"cache entry {entry} is rebuilt")
    assert message in line

    caplog.clear()
    run_again(projection, entry)
    assert compiler.calls == 1
    assert not caplog.records


def test_a_package_that_does_not_load_is_rebuilt(
    projection: Pair, entry: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    """An entry that is consistent, but holds no package."""
    (entry / "model.pt2").write_bytes(b"not a package")
    digest = hashlib.sha256(b"not a package").hexdigest()
    manifest = json.loads((entry / "manifest.json").read_text())
    edit_manifest(entry, sha256={**manifest["sha256"], "model.pt2": digest})
    run_again(projection, entry)

    assert compiler.calls == 1
    assert caplog.text.count("cannot be loaded") == 1


def test_a_folder_that_cannot_be_written(
    projection: Pair, entry: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    folder = entry.parent.parent
    shutil.rmtree(folder)
    folder.write_text("a file where the folder should be")
    run_again(projection, entry)

    assert compiler.calls == 1
    assert "compiling without the cache" in caplog.text


def test_a_network_drive_without_locks_keeps_entries(
    projection: Pair,
    entry: Path,
    compiler: Compiler,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse_locks(monkeypatch, errno.ENOLCK)
    shutil.rmtree(entry)
    run_again(projection, entry)
    run_again(projection, entry)

    assert compiler.calls == 1
    assert (entry / "manifest.json").exists()
    assert "without the cache" not in caplog.text


def code(text: str) -> CompiledCode:
    extras = {"constant0": torch.tensor(text == "second")}
    return CompiledCode(text.encode(), extras, "AVX2", {}, ("x0_0 < 7",))


def test_nothing_is_left_of_an_entry_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    cache = PackageCache(tmp_path, runs_here=lambda _isa: True)
    with pytest.raises(OSError, match="No space left"):
        cache.store("ab" * 32, code("first"))

    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert cache.find("ab" * 32, {}) is None


def test_a_full_disk_does_not_compile_twice(
    projection: Pair,
    entry: Path,
    compiler: Compiler,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    shutil.rmtree(entry)
    monkeypatch.setattr(cache_module, "write_entry", fail)
    run_again(projection, entry)

    assert compiler.calls == 1
    assert "compiling without the cache" in caplog.text
    assert "No space left" in caplog.text


def test_without_any_space_the_graph_runs_op_by_op(
    projection: Pair, entry: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    del compiler

    def fail(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", fail)
    options = BackendOptions(cache_folder=entry.parent.parent, fingerprint="another")
    with pytest.raises(BackendError, match=r"cannot be written.*No space left"):
        compile_graph(projection.graph, backend="aoti", options=options)
    runner = compile_graph(projection.graph, backend="auto", options=options)

    assert runner.backend == "eager"
    notes = [event.text for event in projection.graph.log.of(Noted)]
    assert any("op by op" in text and "No space left" in text for text in notes)


def test_folders_of_killed_builds_are_removed(tmp_path: Path) -> None:
    script = (
        "import os, sys, pathlib\n"
        "from qfuse.kernels.compilation.scratch import scratch_folder\n"
        "with scratch_folder('.new-', pathlib.Path(sys.argv[1])) as folder:\n"
        "    (folder / 'half').write_text('x')\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    (left,) = tmp_path.iterdir()
    cache = PackageCache(tmp_path, runs_here=lambda _isa: True)

    with scratch_folder(".new-", tmp_path) as used:
        os.utime(left, (0, 0))
        os.utime(used, (0, 0))
        cache.store("ab" * 32, code("first"))
        assert not left.exists()
        assert used.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["ab"]


def test_entries_are_replaced_in_one_piece(tmp_path: Path) -> None:
    cache = PackageCache(tmp_path, runs_here=lambda _isa: True)
    key = "cd" * 32
    cache.store(key, code("first"))
    cache.store(key, code("second"))

    found = cache.find(key, {})
    assert found is not None
    assert found.package.read_text() == "second"
    assert found.code.package == b"second"
    assert found.code.extras["constant0"].item() is True
    assert found.code.conditions == ("x0_0 < 7",)


def test_instruction_sets_of_this_machine() -> None:
    assert isa_runs_here("")
    assert isa_runs_here("INVALID_VEC_ISA")
    assert not isa_runs_here("AVX512 AMX_NEXT")


@pytest.mark.isa("avx2")
def test_avx2_runs_here() -> None:
    assert isa_runs_here("AVX2")


@pytest.mark.isa("avx512_vnni")
def test_avx512_runs_here() -> None:
    assert isa_runs_here("AVX512 AVX512_VNNI")
