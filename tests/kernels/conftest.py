"""The kernels, loaded once; every test of them runs on each instruction set of this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qfuse.kernels import KernelLibrary, instruction_set, load

INSTRUCTION_SETS = ("portable", "avx2", "avx_vnni", "avx512", "avx512_vnni", "brgemm")


@pytest.fixture(scope="session")
def library() -> KernelLibrary:
    """The loaded kernels."""
    library = load()
    assert library.available, library.reason
    return library


@pytest.fixture(params=INSTRUCTION_SETS)
def isa(request: pytest.FixtureRequest, library: KernelLibrary) -> Iterator[str]:
    """Run the test on one instruction set."""
    name: str = request.param
    if name not in library.instruction_sets:
        pytest.skip(f"needs {name}")
    with instruction_set(name):
        yield name
