"""Each instruction set's kernels are a library of their own, built and loaded when it is needed."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from tests.support.processes import run_python

from qfuse.kernels import KernelCompiler, KernelLibrary, build_every_path, kernel_cache
from qfuse.kernels.compilation.parts import PATHS, part_of

pytestmark = pytest.mark.slow

SOURCES = Path(kernel_cache.__code__.co_filename).with_name("csrc")
LOADING = """
import logging, torch
from qfuse import kernels
logging.basicConfig(format="%(message)s")
library = kernels.load()
"""
TELLING = f"""{LOADING}
print([library.available, library.default, list(library.instruction_sets), library.reason])
"""
# A product of which no vector is whole, on one instruction set or on that of the machine.
MULTIPLYING = """
import contextlib
torch.manual_seed(0)
x = torch.randint(-128, 128, (3, 37), dtype=torch.int8)
packed = kernels.pack_weight(torch.randint(-128, 128, (5, 37), dtype=torch.int8))
for name in %s:
    with kernels.instruction_set(name) if name else contextlib.nullcontext():
        y = kernels.linear_w8a8(x, torch.ones(1), None, *packed, torch.ones(5))
    print(name or "default", y.flatten().tolist())
"""


def needed(isa: str = "") -> list[str]:
    """The libraries that a process has to load for an instruction set, as the core says."""
    asked = run_python(
        "import sys, torch; from qfuse.kernels.build import build; "
        "from qfuse.kernels import find_kernel_compiler; "
        "torch.ops.load_library(str(build(find_kernel_compiler())[0])); "
        f"print(list(torch.ops.qfuse.missing_kernels({isa!r})))"
    )
    assert asked.returncode == 0, asked.stderr
    found: list[str] = ast.literal_eval(asked.stdout)
    return found


@pytest.fixture(scope="module")
def default() -> list[str]:
    """What this machine needs by default."""
    return needed()


@pytest.fixture
def cache(library: KernelLibrary, tmp_path: Path) -> Path:
    """A cache with the core alone."""
    assert library.path is not None
    add(tmp_path, [library.path])
    return tmp_path


def add(cache: Path, libraries: Iterable[Path]) -> None:
    """Copy libraries with their descriptions to a cache."""
    for path in libraries:
        folder = cache / "kernels" / path.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, folder)
        shutil.copy2(path.with_suffix(".json"), folder)


def libraries_of(names: Iterable[str]) -> list[Path]:
    built = dict(zip(PATHS, build_every_path(), strict=True))
    return [built[name] for name in names]


def failing(folder: Path, compiler: KernelCompiler) -> tuple[str, Path]:
    """A compiler of empty objects, which cannot link them.

    Returns:
        Its command, and the file in which it notes its sources.
    """
    notes = folder / "compiled"
    notes.touch()
    script = folder / "c++"
    script.write_text(
        "#!/bin/sh\n"
        f'[ "$1" = --version ] && echo "{compiler.version}" && exit\n'
        "for word; do\n"
        f'  case "$word" in *.cpp) echo "$word" >> {notes}; source=$word;; esac\n'
        "done\n"
        '[ "$source" ] && : > "$word"\n'
    )
    script.chmod(0o755)
    return str(script), notes


def noted(notes: Path) -> set[str]:
    return {Path(line).relative_to(SOURCES).as_posix() for line in notes.read_text().splitlines()}


def sources_of(parts: Iterable[str]) -> set[str]:
    names = (path.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*.cpp"))
    return {name for name in names if part_of(name) in parts}


@pytest.mark.parametrize("isa", ["", pytest.param("portable", marks=pytest.mark.thorough)])
def test_the_first_load_compiles_what_is_needed(
    compiler: KernelCompiler, tmp_path: Path, default: list[str], isa: str
) -> None:
    command, notes = failing(tmp_path, compiler)
    done = run_python(TELLING, QFUSE_CACHE_DIR=str(tmp_path / "cache"), CXX=command, QFUSE_ISA=isa)

    assert done.returncode == 0, done.stderr
    assert "the C++ compiler failed" in done.stdout
    assert noted(notes) == sources_of(["", *([isa] if isa else default)])
    assert f"the ops, {isa or ', '.join(default)}: {len(noted(notes))} files, " in done.stderr


def test_listing_instruction_sets_builds_nothing(
    library: KernelLibrary, cache: Path, default: list[str]
) -> None:
    add(cache, libraries_of(default))
    before = sorted(cache.rglob("*"))
    done = run_python(TELLING, QFUSE_CACHE_DIR=str(cache), CXX="no-such-compiler", QFUSE_ISA="")

    available, chosen, names, _ = ast.literal_eval(done.stdout)
    assert available, done.stderr
    assert chosen == names[-1]
    assert set(library.instruction_sets) <= set(names)
    assert sorted(cache.rglob("*")) == before


@pytest.mark.thorough
def test_another_instruction_set_is_built_once_and_has_the_same_bits(
    compiler: KernelCompiler, cache: Path, default: list[str]
) -> None:
    del compiler
    add(cache, libraries_of(default))
    code = LOADING + MULTIPLYING % '("", "portable")'
    runs = [run_python(code, QFUSE_CACHE_DIR=str(cache), QFUSE_ISA="") for _ in range(2)]

    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr
    own, portable = (line.partition(" ") for line in runs[0].stdout.splitlines())
    assert (own[0], portable[0]) == ("default", "portable")
    assert own[2] == portable[2]
    assert runs[1].stdout == runs[0].stdout
    assert len(list(cache.rglob("*.o"))) == ("portable" not in default)
    assert "(only once): portable: 1 files, " in runs[0].stderr or default == ["portable"]
    assert "compiling" not in runs[1].stderr


@pytest.mark.thorough
def test_one_that_is_missing_says_so(cache: Path, default: list[str]) -> None:
    if default == ["portable"]:
        pytest.skip("needs another instruction set")
    add(cache, libraries_of(default))
    without = {"QFUSE_CACHE_DIR": str(cache), "CXX": "no-such-compiler"}
    forced = run_python(LOADING + MULTIPLYING % '("portable",)', **without, QFUSE_ISA="")
    named = run_python(LOADING, **without, QFUSE_ISA="portable")

    for done in (forced, named):
        assert done.returncode != 0
        assert "the kernels for portable are not built, and no C++ compiler" in done.stderr
        assert "install a C++20 compiler" in done.stderr


def test_the_next_best_that_is_there_is_used(cache: Path, default: list[str]) -> None:
    add(cache, libraries_of(["portable"]))
    code = TELLING + MULTIPLYING % '("",)'
    done = run_python(code, QFUSE_CACHE_DIR=str(cache), CXX="no-such-compiler", QFUSE_ISA="")

    assert done.returncode == 0, done.stderr
    assert ast.literal_eval(done.stdout.splitlines()[0])[:2] == [True, "portable"]
    slower = "the kernels for portable are used, which are slower"
    assert (slower in done.stderr) == (default != ["portable"])


@pytest.mark.thorough
def test_without_any_there_are_no_kernels(cache: Path, default: list[str]) -> None:
    code = f"{TELLING}\nfrom qfuse.kernels.library import is_loaded\nprint(is_loaded())"
    done = run_python(code, QFUSE_CACHE_DIR=str(cache), CXX="no-such-compiler", QFUSE_ISA="")

    told, loaded = done.stdout.splitlines()
    available, _, _, reason = ast.literal_eval(told)
    assert not available
    assert f"the kernels for {default[0]} are not built" in reason
    assert loaded == "False"


def test_one_that_cannot_be_loaded_is_rebuilt(
    compiler: KernelCompiler, cache: Path, default: list[str]
) -> None:
    """Such as one that was built for a system with another C library."""
    del compiler
    add(cache, libraries_of([*default, "portable"]))
    (spoiled,) = cache.rglob("qfuse_kernels_portable-*.so")
    data = b"not a library"
    spoiled.write_bytes(data)
    entry = json.loads(spoiled.with_suffix(".json").read_text())
    entry["sha256"] = hashlib.sha256(data).hexdigest()
    spoiled.with_suffix(".json").write_text(json.dumps(entry))
    # What was compiled before is only linked.
    (cache / "kernels" / "objects").symlink_to(kernel_cache() / "objects")
    code = LOADING + MULTIPLYING % '("portable",)'
    done = run_python(code, QFUSE_CACHE_DIR=str(cache), QFUSE_ISA="")

    assert done.returncode == 0, done.stderr
    assert re.search("is rebuilt: the kernels for portable cannot be loaded", done.stderr)
    assert spoiled.read_bytes() != data


@pytest.mark.thorough
def test_a_core_of_other_sources_is_refused(library: KernelLibrary, tmp_path: Path) -> None:
    assert library.path is not None
    copied = shutil.copy2(library.path, tmp_path)
    code = f"import torch; torch.ops.load_library({str(copied)!r})\n{TELLING}"
    done = run_python(code, CXX="no-such-compiler")

    available, *_, reason = ast.literal_eval(done.stdout)
    assert not available
    assert "not those of this qfuse" in reason
    assert "instead of torch.ops.load_library" in reason


def test_what_the_processor_lacks_is_not_loaded(library: KernelLibrary, tmp_path: Path) -> None:
    del library
    with pytest.raises(RuntimeError, match="lacks instructions for the kernels of mmx"):
        torch.ops.qfuse.load_kernels("mmx", str(tmp_path))
    assert torch.ops.qfuse.missing_kernels("mmx") == []
