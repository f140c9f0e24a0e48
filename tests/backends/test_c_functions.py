"""Packages call kernels as C functions: same results, readable errors, other processes, threads."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.support.graphs.lowered import finish
from torch.profiler import ProfilerActivity, profile

from qfuse import kernels
from qfuse.backends import BackendOptions, CompiledModule, _inductor_api, compile_graph
from qfuse.ir.graph.stage_graph import LoweredGraph
from qfuse.kernels.library import OPS, c_declarations
from qfuse.testing.build import GraphBuilder

C_TYPES = {
    "Tensor": "AtenTensorHandle",
    "Optional[Tensor]": "AtenTensorHandle*",
    "Optional[List[Tensor]]": "const void*, int64_t",
    "List[int]": "const int64_t*, int64_t",
    "int": "int64_t",
    "float": "double",
    "bool": "int32_t",
    "ScalarType": "int32_t",
    "str": "const char*",
}
"""How AOTInductor's code generator passes an argument of a type of a schema."""

LINEAR = "qfuse::linear_w8a8"
DEPTH, FEATURES, CHANNELS = 36, 70, 6


@dataclass(frozen=True)
class Graph:
    """A graph whose kernels take arguments of every kind, and inputs for it."""

    graph: LoweredGraph
    inputs: tuple[torch.Tensor, ...]

    def compiled(self, folder: Path, backend: str = "aoti") -> CompiledModule:
        options = BackendOptions(cache_folder=folder, runners=4)
        runner = compile_graph(self.graph, backend=backend, options=options)
        return CompiledModule(self.graph.signature, runner)


def every_kind() -> Graph:
    """A linear with a residual, rows that choose their scales, a convolution, joined images."""
    ops = torch.ops.qfuse
    b = GraphBuilder()
    x = b.arg("x", torch.int8, 4, DEPTH)
    scale, zero = b.arg("scale", torch.float32, 4), b.arg("zero", torch.int32, 1)
    residual = b.arg("residual", torch.float32, 4, FEATURES)
    image = b.arg("image", torch.uint8, 1, CHANNELS, 9, 9)
    weight = torch.randint(-128, 128, (FEATURES, DEPTH), dtype=torch.int8)
    packed, sums = (
        b.const(name, value)
        for name, value in zip(("w", "s"), kernels.pack_weight(weight), strict=True)
    )
    w_scale, bias = b.const("w_scale", torch.rand(FEATURES)), b.const("bias", torch.rand(FEATURES))
    y = b.call(
        ops.linear_w8a8.default, x, scale, zero, packed, sums, w_scale, None, bias, [residual],
        "add(0,0.5)|act(relu)", torch.float32, torch.float32,
    )  # fmt: skip
    rows = b.call(
        ops.activation_quantized.default, y, None, None, torch.float32, [], "act(silu)", torch.float32, None, None,
        "ao-asymmetric", 1.2e-7, torch.float32, torch.int32, -128, 127, torch.int8, torch.float32,
        True, False, True, False,
    )  # fmt: skip
    kernel = torch.randint(-128, 128, (20, CHANNELS, 3, 3), dtype=torch.int8)
    out_scale = b.const("out_scale", torch.tensor([0.3]))
    pixels = b.call(
        ops.convolution_w8a8_quantized.default, image, b.const("i_scale", torch.tensor([0.01])),
        b.const("i_zero", torch.tensor([128], dtype=torch.int32)),
        b.const("k", kernels.pack_convolution(kernel)),
        b.const("k_sums", kernels.convolution_sums(kernel)), b.const("k_scale", torch.rand(20)),
        None, None, [3, 3], [1, 1], [1, 1], [1, 1], [0, 0], False, 1, [], "", torch.float32,
        out_scale, None, -128, 127, True, False, torch.int8,
    )  # fmt: skip
    joined = b.call(ops.cat_channels.default, pixels, [pixels, pixels])
    alone = b.call(ops.cat_channels.default, pixels, [])
    graph = finish(b, [y, *(b.item(rows, index) for index in range(4)), pixels, joined, alone])
    inputs = (
        torch.randint(-128, 128, (4, DEPTH), dtype=torch.int8),
        torch.rand(4) * 0.01 + 0.003,
        torch.tensor([3], dtype=torch.int32),
        torch.randn(4, FEATURES),
        torch.randint(0, 256, (1, CHANNELS, 9, 9)).to(torch.uint8),
    )
    return Graph(graph, inputs)


@pytest.fixture(scope="module")
def made(needs_compiler: None) -> Graph:
    del needs_compiler
    library = kernels.load()
    if not library.available:
        pytest.skip(library.reason)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return every_kind()


@pytest.fixture(scope="module")
def folder(cache_folder: Path) -> Path:
    return cache_folder / "c-functions"


@pytest.fixture(scope="module")
def fast(made: Graph, folder: Path) -> CompiledModule:
    return made.compiled(folder)


@pytest.mark.thorough
def test_the_results_are_those_of_the_ops(made: Graph, fast: CompiledModule, folder: Path) -> None:
    expected = made.compiled(folder, "eager")(*made.inputs)

    assert all(map(torch.equal, fast(*made.inputs), expected))


def test_no_kernel_is_called_through_the_dispatcher(fast: CompiledModule, folder: Path) -> None:
    del fast
    (package,) = folder.glob("*/*/model.pt2")
    with zipfile.ZipFile(package) as archive:
        codes = [archive.read(n).decode() for n in archive.namelist() if n.endswith("wrapper.cpp")]
    code = "".join(codes)

    names = ("linear_w8a8", "activation_quantized", "convolution_w8a8_quantized", "cat_channels")
    for name in names:
        assert f"CHECK(aoti_torch_cpu_{name}(" in code
    assert "proxy_executor_call_function(" not in code


def test_profilers_see_the_kernels(made: Graph, fast: CompiledModule) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        fast(*made.inputs)

    assert LINEAR in {event.key for event in seen.key_averages()}


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (2, torch.tensor([1003], dtype=torch.int32), "x_zero_point 1003 is outside of the range"),
        (2, torch.tensor([-129], dtype=torch.int32), "x_zero_point -129 is outside of the range"),
    ],
)
def test_the_message_of_a_kernel_reaches_the_caller(
    made: Graph, fast: CompiledModule, position: int, value: torch.Tensor, message: str
) -> None:
    wrong = list(made.inputs)
    wrong[position] = value

    with pytest.raises(RuntimeError, match=message):
        fast(*wrong)
    fast(*made.inputs)


@pytest.mark.parametrize("threads", [None, 2])
def test_threads_compute_the_same_bits(
    made: Graph, fast: CompiledModule, threads: int | None
) -> None:
    module = fast.with_threads(threads)
    x, scale, zero, residual, image = made.inputs
    cases = [
        (x.roll(i, 0), scale.roll(i), zero + i % 3, residual * (i % 3), image.roll(i, 2))
        for i in range(6)
    ]
    expected = [module(*case) for case in cases]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda i: module(*cases[i % 6]), range(240)))

    for index, got in enumerate(results):
        assert all(map(torch.equal, got, expected[index % 6]))


_LOAD = """
import sys
from pathlib import Path
from qfuse import kernels
from qfuse.backends import _inductor_api
if sys.argv[2] == "with":
    kernels.load()
try:
    _inductor_api.load_package(Path(sys.argv[1]), {}, 1)
except (RuntimeError, KeyError) as error:
    print(type(error).__name__, error)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("loaded", "said"),
    # The constants are missing, but the library was loaded.
    [("with", "KeyError"), ("without", "undefined symbol: aoti_torch_cpu_")],
)
def test_another_process_needs_the_kernels(
    fast: CompiledModule, folder: Path, loaded: str, said: str
) -> None:
    del fast
    (package,) = folder.glob("*/*/model.pt2")

    done = subprocess.run(
        [sys.executable, "-c", _LOAD, str(package), loaded],
        capture_output=True, text=True, check=True, env=dict(os.environ), timeout=300,
    )  # fmt: skip

    assert said in done.stdout


def test_declarations_are_those_of_the_schemas(made: Graph) -> None:
    del made
    declarations = c_declarations()
    assert len(declarations) == len(OPS)
    for op, text in declarations.items():
        schema = op._schema
        types = [C_TYPES[str(a.real_type)] for a in schema.arguments]
        results = ["AtenTensorHandle*"] * len(schema.returns)
        name = f"aoti_torch_cpu_{schema.name.removeprefix('qfuse::')}"

        assert text == f"AOTITorchError (*const {name})({', '.join([*types, *results])})"


def test_no_option_without_kernels_in_the_graph() -> None:
    assert _inductor_api.called_directly({}) == {}
