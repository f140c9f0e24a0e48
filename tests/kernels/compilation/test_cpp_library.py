"""Kernels that have a C++ standard library of their own are not loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.static_cpp import has_static_libstdcxx

from qfuse.kernels import KernelBuildError, KernelCompiler, kernel_cache
from qfuse.kernels.build import build

STREAM = """
#include <sstream>
#include <string>
std::string text(int n) { std::ostringstream out; out << n; return out.str(); }
"""


def test_a_library_with_a_standard_library_of_its_own_is_refused(
    compiler: KernelCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_static_libstdcxx(compiler.command[0]):
        pytest.skip("needs libstdc++.a")
    monkeypatch.setenv("QFUSE_CACHE_DIR", str(tmp_path / "cache"))
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "stream.cpp").write_text(STREAM)
    static = KernelCompiler((*compiler.command, "-static-libstdc++"), compiler.version)

    with pytest.raises(KernelBuildError, match=r"links a copy of libstdc\+\+") as error:
        build(static, sources=sources)
    assert "do: name a compiler in CXX" in str(error.value)
    assert not list(kernel_cache().rglob("*.so"))
    assert build(compiler, sources=sources)[1]
