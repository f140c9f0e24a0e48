"""Which libraries a machine needs first, and what they are made of."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from tests.support.processes import run_python

from qfuse.kernels import KernelBuildError, KernelCompiler, KernelLibrary, kernel_cache
from qfuse.kernels.build import build
from qfuse.kernels.compilation.parts import CORE, PATHS, duration, expected_parts, part_of

SOURCES = Path(build.__code__.co_filename).with_name("csrc")
AVX2 = {"avx2", "fma3"}
AVX512 = {*AVX2, "avx512_f", "avx512_bw", "avx512_dq", "avx512_vl"}
AMX = {*AVX512, "avx512_vnni", "amx_tile", "amx_int8", "amx_bf16"}


@pytest.mark.parametrize(
    ("features", "isa", "parts"),
    [
        (set(), "", ["portable"]),
        ({"avx2"}, "", ["portable"]),
        (AVX2, "", ["avx2"]),
        ({*AVX2, "avx_vnni"}, "", ["avx2", "avx_vnni"]),
        (AVX512, "", ["avx512"]),
        (AVX512 - {"avx512_bw"}, "", ["avx2"]),
        ({*AVX512, "avx_vnni"}, "", ["avx512"]),
        ({*AVX512, "avx512_vnni", "amx_int8"}, "", ["avx512", "avx512_vnni"]),
        (AMX, "", ["avx512", "avx512_vnni", "amx"]),
        (AMX, "avx512_vnni", ["avx512", "avx512_vnni"]),
        ({*AVX512, "avx512_vnni"}, "avx2", ["avx2"]),
        ({*AVX512, "avx512_vnni"}, "amx_emulated", ["avx512", "avx512_vnni", "amx_emulated"]),
        ({*AVX512, "avx512_vnni"}, "avx_vnni", ["avx2", "avx_vnni_evex"]),
        ({*AVX512, "avx512_vnni", "avx_vnni"}, "avx_vnni", ["avx2", "avx_vnni"]),
        (AVX2, "mmx", []),
    ],
)
def test_what_a_processor_needs(features: set[str], isa: str, parts: list[str]) -> None:
    assert expected_parts(dict.fromkeys(features, True), isa) == tuple(parts)


@pytest.mark.slow
def test_the_core_of_this_machine_needs_what_is_expected(library: KernelLibrary) -> None:
    code = (
        "import torch; from qfuse.kernels.compilation.parts import expected_parts; "
        f"torch.ops.load_library({str(library.path)!r}); "
        "seen = torch.cpu.get_capabilities(); "
        "print([(list(expected_parts(seen, isa)), torch.ops.qfuse.missing_kernels(isa)) "
        "for isa in ('', *torch.ops.qfuse.list_kernels())])"
    )
    done = run_python(code)

    assert done.returncode == 0, done.stderr
    pairs = ast.literal_eval(done.stdout)
    assert len(pairs) == 1 + len(torch.ops.qfuse.list_kernels())
    assert all(expected == needed for expected, needed in pairs)


def test_every_path_has_its_files() -> None:
    names = [path.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*.cpp")]
    assert {part_of(name) for name in names} >= {CORE, *PATHS}
    exporting = [name for name in names if "QFUSE_PATH_LIBRARY(" in (SOURCES / name).read_text()]
    assert sorted(map(part_of, exporting)) == sorted({*map(part_of, names)} - {CORE})


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A core and two paths, and an empty cache to build them into."""
    monkeypatch.setenv("QFUSE_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("answer.cpp", "isa/portable.cpp", "isa/avx2.cpp"):
        path = tmp_path / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'extern "C" int {path.stem}() {{ return 1; }}\n')
    return tmp_path / "csrc"


def built(kind: str) -> list[str]:
    """The first parts of the names of files in the cache."""
    return sorted(path.name.partition("-")[0] for path in kernel_cache().rglob(f"*.{kind}"))


def test_a_part_is_built_when_it_is_asked_for(compiler: KernelCompiler, sources: Path) -> None:
    core, _ = build(compiler, sources=sources)
    assert built("so") == ["qfuse_kernels"]
    assert len(built("o")) == 1

    path, compiled = build(compiler, "portable", sources=sources)
    assert compiled
    assert path.parent == core.parent
    assert built("so") == ["qfuse_kernels", "qfuse_kernels_portable"]
    assert build(None, "portable", sources=sources) == (path, False)
    assert len(built("o")) == 2


def test_parts_that_are_built_ahead(compiler: KernelCompiler, sources: Path) -> None:
    build(compiler, "avx2", sources=sources)
    _, compiled = build(compiler, ahead=("portable", "avx2"), sources=sources)

    assert compiled
    assert built("so") == ["qfuse_kernels", "qfuse_kernels_avx2", "qfuse_kernels_portable"]
    assert not build(compiler, "portable", sources=sources)[1]


def test_nothing_is_built_ahead_of_what_is_there(compiler: KernelCompiler, sources: Path) -> None:
    build(compiler, sources=sources)
    assert not build(compiler, ahead=("portable",), sources=sources)[1]
    assert built("so") == ["qfuse_kernels"]


def test_a_part_that_does_not_compile_leaves_none(compiler: KernelCompiler, sources: Path) -> None:
    (sources / "isa" / "portable.cpp").write_text("int portable() { return nothing; }\n")
    with pytest.raises(KernelBuildError, match="nothing"):
        build(compiler, ahead=("portable",), sources=sources)
    assert built("so") == []

    _, compiled = build(compiler, sources=sources)
    assert compiled


def test_without_a_compiler_the_part_is_named(sources: Path) -> None:
    with pytest.raises(KernelBuildError, match="the kernels for avx2 are not built, and no C"):
        build(None, "avx2", sources=sources)


def test_about_how_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QFUSE_SANITIZE", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    one = duration((CORE, "portable"))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    two = duration((CORE, "portable"))
    assert one.endswith("s on 1 core")
    assert two.endswith("s on 2 cores")
    assert int(one.split()[1]) > int(two.split()[1])
    monkeypatch.setenv("QFUSE_SANITIZE", "address")
    assert duration((CORE,)) == "many minutes"
