"""Blocks that are compiled once: equal bits, several threads, the cache, and the reasons against.

One compilation takes about thirty seconds, so that the tests share the packages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from tests.support.graphs.lowered import aten, finish
from tests.support.graphs.repeated import bare, stacked, weights

from qfuse import kernels
from qfuse.backends import BackendOptions, CompiledModule, compile_graph
from qfuse.backends.aoti import AotiRunner
from qfuse.backends.blocks.chain import CompiledChain, joint_conditions, load_chain
from qfuse.backends.cache import CompiledCode
from qfuse.backends.runner import BlockChoice
from qfuse.ir.errors import BackendError, OptionsError
from qfuse.ir.events import Noted
from qfuse.ir.graph.stage_graph import LoweredGraph
from qfuse.targets.compiler import find_compiler
from qfuse.testing.build import GraphBuilder

Test = TypeVar("Test", bound=Callable[..., None])


def compiled_once(test: Test) -> Test:
    """Mark a test that needs packages."""
    for mark in (pytest.mark.slow, pytest.mark.compiler, pytest.mark.thorough):
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_compiler() is None:
        pytest.skip("needs a C++ compiler")
    if not kernels.load().available:
        pytest.skip("needs qfuse's kernels")
    return tmp_path_factory.mktemp("blocks")


def compiled(graph: LoweredGraph, folder: Path, blocks: BlockChoice) -> AotiRunner:
    options = BackendOptions(cache_folder=folder, blocks=blocks, runners=2)
    runner = compile_graph(graph, backend="aoti", options=options)
    assert isinstance(runner, AotiRunner)
    return runner


def chain_of(runner: AotiRunner) -> CompiledChain:
    assert isinstance(runner.code, CompiledChain)
    return runner.code


def notes(graph: LoweredGraph) -> list[str]:
    return [note.text for note in graph.log.of(Noted)]


@pytest.fixture(scope="module")
def graph() -> LoweredGraph:
    return stacked(5)


@pytest.fixture(scope="module")
def chained(graph: LoweredGraph, folder: Path) -> AotiRunner:
    return compiled(graph, folder, BlockChoice.ON)


@compiled_once
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_equal_bits_for_any_number_of_rows(
    graph: LoweredGraph, chained: AotiRunner, folder: Path, rows: int
) -> None:
    whole = compiled(graph, folder, BlockChoice.OFF)
    inputs = [torch.randn(rows, 16), torch.randn(16)]

    assert isinstance(whole.code, CompiledCode)
    assert len(chain_of(chained).codes) == 3
    assert torch.equal(chained.run(list(inputs))[0], whole.run(list(inputs))[0])


@compiled_once
def test_the_log_names_the_blocks(graph: LoweredGraph, chained: AotiRunner) -> None:
    del chained
    assert (
        "the graph repeats a block 4 times, which is compiled once: 3 packages, run 6 times in a "
        "call"
    ) in notes(graph)


@compiled_once
def test_a_model_of_another_depth_finds_the_packages(chained: AotiRunner, folder: Path) -> None:
    del chained
    before = set(folder.rglob("model.pt2"))
    deep = compiled(stacked(8), folder, BlockChoice.ON)

    assert len(chain_of(deep).wiring.steps) == 9
    # The small weight of the last layer is in the key of what is after the blocks.
    assert len(set(folder.rglob("model.pt2")) - before) == 1
    module = CompiledModule(stacked(8).signature, deep)
    want = compile_graph(stacked(8), backend="eager").run([torch.ones(3, 16), torch.ones(16)])
    torch.testing.assert_close(module(torch.ones(3, 16), torch.ones(16))[0], want[0])


@compiled_once
def test_several_threads_at_the_same_time(graph: LoweredGraph, chained: AotiRunner) -> None:
    module = CompiledModule(graph.signature, chained, threads=1)
    angle = torch.randn(16)
    inputs = [torch.randn(1 + i % 4, 16) for i in range(60)]
    want = [module(x, angle)[0] for x in inputs]

    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda x: module(x, angle)[0], inputs))

    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@compiled_once
def test_copies_share_the_code(graph: LoweredGraph, chained: AotiRunner) -> None:
    module = CompiledModule(graph.signature, chained)
    x, angle = torch.randn(3, 16), torch.randn(16)

    assert torch.equal(copy.deepcopy(module)(x, angle)[0], module(x, angle)[0])


@compiled_once
def test_a_wrong_number_of_inputs_is_refused(chained: AotiRunner) -> None:
    with pytest.raises(RuntimeError, match="the chain has 2 inputs, not 1"):
        chained._entry([torch.randn(2, 16)])


@compiled_once
def test_a_missing_constant_is_refused(chained: AotiRunner) -> None:
    with pytest.raises(BackendError, match="the compiled blocks cannot be loaded"):
        load_chain(chain_of(chained), {}, 1)


@compiled_once
def test_small_constants_that_differ(folder: Path) -> None:
    runner = compiled(bare(), folder, BlockChoice.ON)
    inputs = [torch.randn(3, 16)]

    assert len(chain_of(runner).codes) == 1
    assert len(chain_of(runner).wiring.held) == 4
    want = compile_graph(bare(), backend="eager").run(list(inputs))
    torch.testing.assert_close(runner.run(list(inputs))[0], want[0])


def strided(layers: int) -> LoweredGraph:
    """Layers with small constants that differ and that are columns of a table."""
    b = GraphBuilder()
    stream = b.arg("x", torch.float32, "n", 4)
    table = torch.arange(4.0 * layers).reshape(4, layers) / 8
    for number in range(layers):
        weight = b.const(f"weight_{number}", weights(number, 4, 4))
        gain = b.const(f"gain_{number}", table[:, number])
        stream = b.call(aten.mul.Tensor, b.call(aten.tanh.default, stream), gain)
        stream = b.call(aten.linear.default, stream, weight)
    return finish(b, [stream])


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.compiler
def test_deep_graphs_are_compiled_in_parts_by_choice_of_auto(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qfuse.backends.blocks.build.DEEP", 3)
    runner = compiled(strided(4), folder, BlockChoice.AUTO)
    x = torch.randn(3, 4)

    assert len(chain_of(runner).codes) == 1
    assert any(value.stride() == (4,) for value in runner.constants.values())
    want = compile_graph(strided(4), backend="eager").run([x])
    torch.testing.assert_close(runner.run([x])[0], want[0])


@compiled_once
def test_one_package_where_nothing_repeats(folder: Path) -> None:
    graph = stacked(2, rows=3)
    runner = compiled(graph, folder, BlockChoice.ON)

    assert isinstance(runner.code, CompiledCode)
    assert (
        "the graph is compiled as one package: no part of the graph occurs 3 times in a row"
    ) in notes(graph)


@compiled_once
def test_shallow_graphs_stay_whole_by_default(graph: LoweredGraph, folder: Path) -> None:
    runner = compiled(graph, folder, BlockChoice.AUTO)

    assert isinstance(runner.code, CompiledCode)


def test_conditions_of_all_parts_over_the_names_of_the_whole() -> None:
    codes = [
        CompiledCode(b"", {}, "", {}, ("x0_0 >= 1", "x2_1 < 7")),
        CompiledCode(b"", {}, "", {}, ("x1_0 >= 1",)),
    ]
    names: list[dict[str, str]] = [{"x0_0": "x2_1", "x2_1": "x0_0"}, {"x1_0": "x2_1"}]

    assert joint_conditions(codes, names) == ("x2_1 >= 1", "x0_0 < 7")
    with pytest.raises(BackendError, match="on sizes of its own: x0_0 >= 1"):
        joint_conditions(codes, [{"x2_1": "x0_0"}, {}])


def test_the_environment_has_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QFUSE_BLOCKS", raising=False)
    assert BackendOptions().blocks is BlockChoice.AUTO
    monkeypatch.setenv("QFUSE_BLOCKS", "off")
    assert BackendOptions().blocks is BlockChoice.OFF
    monkeypatch.setenv("QFUSE_BLOCKS", "yes")
    with pytest.raises(OptionsError, match="QFUSE_BLOCKS='yes' is unknown") as caught:
        BackendOptions()
    assert caught.value.fix == "one of auto, on, off"
