"""Models of several packages give the same bits after loading, and damage is found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.saving.conftest import Reload
from tests.support.graphs.repeated import bare

from qfuse import kernels
from qfuse.backends import BackendOptions, CompiledModule, compile_graph
from qfuse.backends.aoti import AotiRunner
from qfuse.backends.blocks.chain import CompiledChain
from qfuse.backends.runner import BlockChoice
from qfuse.ir.errors import ModelFileError
from qfuse.report import Report
from qfuse.saving.container import open_file
from qfuse.saving.load import read_model
from qfuse.saving.model import SavedModel, code_member
from qfuse.saving.save import save_model

pytestmark = [pytest.mark.slow, pytest.mark.compiler, pytest.mark.thorough]


@pytest.fixture
def chained(cache_folder: Path, needs_compiler: None) -> CompiledModule:
    del needs_compiler
    if not kernels.load().available:
        pytest.skip("needs qfuse's kernels")
    options = BackendOptions(cache_folder=cache_folder / "blocks", blocks=BlockChoice.ON)
    graph = bare()
    return CompiledModule(graph.signature, compile_graph(graph, backend="aoti", options=options))


def test_a_chain_gives_the_same_bits(chained: CompiledModule, reload: Reload) -> None:
    saved = reload(chained, bare())
    runner = saved.module.runner

    assert isinstance(runner, AotiRunner)
    assert isinstance(runner.code, CompiledChain)
    for rows in (1, 2, 7):
        x = torch.randn(rows, 16)
        assert torch.equal(saved.module(x)[0], chained(x)[0])


def test_a_saved_chain_is_saved_again(chained: CompiledModule, reload: Reload) -> None:
    first = reload(chained, bare())
    second = reload(first.module, first.lowered)
    x = torch.randn(3, 16)

    assert torch.equal(second.module(x)[0], chained(x)[0])


@pytest.mark.parametrize("verify", [True, False])
def test_a_damaged_package_is_refused(
    chained: CompiledModule, tmp_path: Path, verify: bool
) -> None:
    path = tmp_path / "model.qfuse"
    save_model(path, SavedModel(chained, bare(), Report(()), "the plan", None))
    begin, _ = open_file(path).place(code_member(0))
    data = bytearray(path.read_bytes())
    data[begin + 100] ^= 1
    path.write_bytes(data)

    with pytest.raises(ModelFileError, match=r"the bytes of 'code-0\.pt2' are not those"):
        read_model(path, verify=verify)
