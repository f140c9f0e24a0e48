"""The kernels, loaded once; every test of them runs on each instruction set of this machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from qfuse.kernels import (
    KernelCompiler,
    KernelLibrary,
    find_kernel_compiler,
    instruction_set,
    load,
)

FOLDER = Path(__file__).parent
INSTRUCTION_SETS = (
    "portable", "avx2", "avx_vnni", "avx512", "amx_emulated", "avx512_vnni", "amx"
)  # fmt: skip
# These have integer products of their own; the rest of them is that of avx2 and of avx512_vnni.
SHARING = ("avx_vnni", "avx512")
PRODUCTS = (
    "test_linear_w8a8.py",
    "test_linear_grouped.py",
    "test_bounds.py",
    "test_matmul_a8a8.py",
    "test_convolution_w8a8.py",
    "test_convolution_grouped.py",
)


# A test of so many combinations runs those that hold every pair of values, see `tests.support.pairs`.
MANY = 40


@pytest.hookimpl(tryfirst=True)  # what is marked here is read in tests/conftest.py
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to ``make test-all`` what instruction sets share, and most of many combinations."""
    tests = defaultdict(list)
    for item in items:
        spec = getattr(item, "callspec", None)
        if spec is None or not item.path.is_relative_to(FOLDER):
            continue
        tests[item.path, item.originalname].append(item)  # type: ignore[attr-defined]
        if spec.params.get("isa") in SHARING and item.path.name not in PRODUCTS:
            item.add_marker("thorough")
    for found in tests.values():
        if len(found) >= MANY:
            for item in found:
                item.add_marker("pairs")


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


@pytest.fixture
def compiler() -> KernelCompiler:
    """The compiler of this machine."""
    found = find_kernel_compiler()
    if found is None:
        pytest.skip("needs a C++ compiler")
    return found
