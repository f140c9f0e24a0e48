"""Compiled graphs give the same bits after loading, with their state, aliases and conditions."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.backends.conftest import Pair
from tests.saving.conftest import Reload

from qfuse.backends import CompiledModule
from qfuse.backends.aoti import AotiRunner
from qfuse.backends.claimed import run_claimed
from qfuse.ir.errors import InputError, ModelFileError
from qfuse.report import Report
from qfuse.saving import load
from qfuse.saving.model import SavedModel
from qfuse.saving.save import save_model


def assert_same(have: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> None:
    for one, other in zip(have, want, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


def part(pair: Pair, kind: str) -> CompiledModule:
    return pair.fast if kind == "aoti" else pair.plain


@pytest.mark.parametrize("kind", ["aoti", "eager"])
def test_any_number_of_rows(projection: Pair, reload: Reload, kind: str) -> None:
    module = part(projection, kind)
    saved = reload(module, projection.graph)
    assert saved.module.backend == kind
    assert saved.plan == "the plan"
    assert saved.examples is None
    for rows in (1, 2, 5, 300):
        inputs = torch.randn(rows, 16), torch.randint(0, 10, (rows,))
        assert_same(saved.module(*inputs), module(*inputs))
        assert_same(saved.module(inputs[0].t().contiguous().t(), ids=inputs[1]), module(*inputs))
    with pytest.raises(InputError, match=r"x: expected float32\[.*got float64"):
        saved.module(torch.randn(3, 16).double(), torch.zeros(3, dtype=torch.int64))


def test_without_its_instruction_set_the_graph_runs_op_by_op(
    projection: Pair, reload: Reload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "isa_runs_here", lambda isa: not isa)
    saved = reload(projection.fast, projection.graph)

    assert saved.module.backend == "eager"
    inputs = torch.randn(5, 16), torch.randint(0, 10, (5,))
    assert_same(saved.module(*inputs), projection.plain(*inputs))


@pytest.mark.parametrize("kind", ["aoti", "eager"])
def test_threads_share_a_loaded_model(projection: Pair, reload: Reload, kind: str) -> None:
    module = part(projection, kind)
    saved = reload(module, projection.graph).module.with_threads(1)
    cases = [(torch.randn(rows, 16), torch.randint(0, 10, (rows,))) for rows in (1, 5, 33)]
    expected = [saved(*case) for case in cases]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda i: saved(*cases[i % 3]), range(120)))

    for index, got in enumerate(results):
        assert_same(got, expected[index % 3])


def step(position: int) -> list[torch.Tensor]:
    values = torch.randn(1, 2, 16, 8)
    return [torch.randn(1, 2, 1, 8), torch.tensor([position]), values]


def run_steps(
    module: CompiledModule, inputs: Sequence[Sequence[torch.Tensor]]
) -> list[torch.Tensor]:
    results = []
    for given in inputs:
        copies = [value.clone() for value in given]
        outputs = module(*copies)
        # The input itself is returned, after it was written.
        assert outputs[2] is copies[2]
        results += [value.clone() for value in outputs]
    return results


@pytest.mark.parametrize("kind", ["aoti", "eager"])
def test_state_continues_where_it_was(decode: Pair, reload: Reload, kind: str) -> None:
    module = part(decode, kind)
    before, after = [step(0), step(1)], [step(2), step(3), step(4)]
    run_steps(module, before)
    saved = reload(module, decode.graph)
    fork = copy.deepcopy(saved.module)
    want = run_steps(module, after)

    assert_same(run_steps(saved.module, after), want)
    # Its copy has a state of its own, of which aliases are parts.
    assert_same(run_steps(fork, after), want)


def test_state_is_saved_as_it_is_now(decode: Pair, reload: Reload) -> None:
    first = reload(decode.fast, decode.graph)
    run_steps(first.module, [step(0), step(1)])
    second = reload(first.module, first.lowered)
    after = [step(2), step(3)]
    assert_same(run_steps(second.module, after), run_steps(first.module, after))


def test_inputs_that_share_memory_with_the_state_are_refused(decode: Pair, reload: Reload) -> None:
    saved = reload(decode.fast, decode.graph)
    runner = saved.module.runner
    assert isinstance(runner, AotiRunner)
    keys = runner.otherwise.module.get_buffer("keys")
    with pytest.raises(InputError, match="shares memory with the model's own keys"):
        saved.module(torch.randn(1, 2, 1, 8), torch.tensor([0]), keys)


def test_sizes_for_which_the_code_is_wrong_run_op_by_op(projection: Pair, reload: Reload) -> None:
    runner = projection.fast.runner
    assert isinstance(runner, AotiRunner)
    code = replace(runner.code, conditions=("x0_0 < 7",))
    limited = AotiRunner(runner.plan, code, runner._entry, runner.constants, runner.otherwise)
    saved = reload(CompiledModule(projection.graph.signature, limited), projection.graph)
    again = saved.module.runner
    assert isinstance(again, AotiRunner)

    calls: list[int] = []
    entry = again._entry

    def counted(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        calls.append(len(tensors[0]))
        return entry(tensors)

    again._entry = counted
    for rows in (6, 7):
        inputs = torch.randn(rows, 16), torch.randint(0, 10, (rows,))
        torch.testing.assert_close(saved.module(*inputs), projection.plain(*inputs))
    assert calls == [6]


def test_weights_are_mapped(projection: Pair, reload: Reload) -> None:
    saved = reload(projection.fast, projection.graph)
    weight = saved.lowered.module.get_buffer("weight")
    runner = saved.module.runner
    assert isinstance(runner, AotiRunner)
    # One memory for the code and for the graph, in the mapping of the file.
    assert weight.data_ptr() in {value.data_ptr() for value in runner.constants.values()}
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    (found,) = [
        line
        for line in maps
        if int(line[0].split("-")[0], 16) <= weight.data_ptr() < int(line[0].split("-")[1], 16)
    ]
    assert found[5].endswith("model.qfuse")


def test_code_of_other_backends_is_refused(projection: Pair, tmp_path: Path) -> None:
    module = CompiledModule(projection.graph.signature, run_claimed(projection.graph, []))
    model = SavedModel(module, projection.graph, Report(()), "", None)
    with pytest.raises(ModelFileError, match="cannot save"):
        save_model(tmp_path / "m.qfuse", model)
    assert list(tmp_path.iterdir()) == []
