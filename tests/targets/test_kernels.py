"""A schema is not a kernel, and what a process has imported does not change the answer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from qfuse.ir.errors import OptionsError
from qfuse.targets import KERNELS, KernelProbe, KernelState, probe_kernel
from qfuse.targets.kernels import probe_kernels


class Namespace:
    """Operators of our own that end with the test."""

    def __init__(self, library: torch.library.Library) -> None:
        self._library = library

    def define(self, schema: str) -> None:
        self._library.define(schema)  # type: ignore[no-untyped-call]

    def impl(self, name: str, kernel: Callable[..., object], key: str) -> None:
        self._library.impl(name, kernel, key)  # type: ignore[no-untyped-call]


@pytest.fixture
def library() -> Iterator[Namespace]:
    with torch.library._scoped_library("qfuse_probe_test", "FRAGMENT") as scoped:
        yield Namespace(scoped)


def test_a_schema_alone_is_no_kernel(library: Namespace) -> None:
    library.define("hollow(Tensor x) -> Tensor")

    assert hasattr(torch.ops.qfuse_probe_test, "hollow")
    assert probe_kernel(KernelProbe("qfuse_probe_test::hollow")) is KernelState.SCHEMA_ONLY


def test_shapes_alone_are_no_kernel(library: Namespace) -> None:
    library.define("shapes(Tensor x) -> Tensor")
    library.impl("shapes", torch.empty_like, "Meta")

    assert probe_kernel(KernelProbe("qfuse_probe_test::shapes")) is KernelState.SCHEMA_ONLY
    with pytest.raises(NotImplementedError):
        torch.ops.qfuse_probe_test.shapes(torch.ones(1))


def test_code_for_the_device_is_a_kernel(library: Namespace) -> None:
    library.define("solid(Tensor x) -> Tensor")
    library.impl("solid", torch.neg, "CPU")

    assert probe_kernel(KernelProbe("qfuse_probe_test::solid")) is KernelState.AVAILABLE
    assert torch.ops.qfuse_probe_test.solid(torch.ones(1)).item() == -1


def test_the_key_counts(library: Namespace) -> None:
    library.define("packed(Tensor x) -> Tensor")
    library.impl("packed", torch.neg, "MkldnnCPU")

    name = "qfuse_probe_test::packed"
    assert probe_kernel(KernelProbe(name)) is KernelState.SCHEMA_ONLY
    assert probe_kernel(KernelProbe(name, "MkldnnCPU")) is KernelState.AVAILABLE


def test_overloads_are_looked_up_apart(library: Namespace) -> None:
    library.define("two(Tensor x) -> Tensor")
    library.define("two.scaled(Tensor x, float scale) -> Tensor")
    library.impl("two", torch.neg, "CPU")

    assert probe_kernel(KernelProbe("qfuse_probe_test::two")) is KernelState.AVAILABLE
    assert probe_kernel(KernelProbe("qfuse_probe_test::two.scaled")) is KernelState.SCHEMA_ONLY
    assert probe_kernel(KernelProbe("qfuse_probe_test::two.other")) is KernelState.ABSENT


def test_an_unknown_operator_is_absent() -> None:
    assert probe_kernel(KernelProbe("qfuse_probe_test::never")) is KernelState.ABSENT


@pytest.mark.parametrize("name", ["linear", "aten.linear", "aten::linear.a.b", "aten:: linear", ""])
def test_a_malformed_name_is_refused(name: str) -> None:
    with pytest.raises(OptionsError, match="is not an operator name"):
        KernelProbe(name)


def test_a_misspelt_key_is_no_silent_no() -> None:
    with pytest.raises(RuntimeError, match="could not parse dispatch key"):
        probe_kernel(KernelProbe("aten::_int_mm", "Cpu"))


def test_convolutions_packed_by_onednn_are_found() -> None:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        pytest.skip("this torch has no oneDNN")
    states = dict(probe_kernels(KERNELS, import_packages=False))

    assert states["onednn::qconv2d_pointwise"] is KernelState.AVAILABLE
    assert states["onednn::qlinear_pointwise"] is KernelState.AVAILABLE


def test_packages_are_unprobed_even_if_they_are_loaded() -> None:
    with torch.library._scoped_library("torchao", "FRAGMENT") as loaded:
        Namespace(loaded).define("qfuse_probe_loaded(Tensor x) -> Tensor")
        probe = KernelProbe("torchao::qfuse_probe_loaded")

        assert probe_kernel(probe) is KernelState.SCHEMA_ONLY
        assert probe_kernels([probe], import_packages=False) == (
            (probe.name, KernelState.UNPROBED),
        )


PROBE = """
import sys
from qfuse.targets import KernelProbe
from qfuse.targets.kernels import probe_kernels
import_packages = sys.argv[1] == "import"
[(_, state)] = probe_kernels([KernelProbe("torchao::da8w4_linear_cpu")],
                             import_packages=import_packages)
print(state, "torchao" in sys.modules)
"""


def probe_in_new_process(mode: str, folder: Path) -> tuple[str, str]:
    """State and whether torchao came in, and the log, with the modules of a folder first."""
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\n{PROBE}"
    done = subprocess.run(
        [sys.executable, "-c", code, mode], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.strip(), done.stderr


@pytest.mark.slow
def test_without_leave_nothing_is_imported(tmp_path: Path) -> None:
    assert probe_in_new_process("leave", tmp_path)[0] == "unprobed False"


@pytest.mark.slow
def test_a_broken_package_is_absent_and_logged(tmp_path: Path) -> None:
    (tmp_path / "torchao.py").write_text("raise ImportError('built for another torch')")

    said, log = probe_in_new_process("import", tmp_path)

    assert said == "absent False"
    assert "torchao is installed but cannot be imported: built for another torch" in log


def test_states_come_sorted_and_once() -> None:
    states = probe_kernels([*reversed(KERNELS), *KERNELS], import_packages=False)

    assert [name for name, _ in states] == sorted({probe.name for probe in KERNELS})
