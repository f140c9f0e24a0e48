"""A profile measures every op, predicts what it has a model of, and changes nothing."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch
from tests.support.graphs.reported_models import Blocks
from torch import nn
from torch.export import Dim

import qfuse
from qfuse.cost import Bits, ComputeKind, CostModel, CostProfile, linear_work
from qfuse.ir.errors import InputError
from qfuse.profile import OpTime, Profile, profile_plan
from qfuse.profile.run import _Clock, _ops
from qfuse.profile.work import OpWork
from qfuse.targets import Target

MACHINE = CostProfile.pinned()


def compiled(model: nn.Module, *args: torch.Tensor, **given: object) -> qfuse.CompiledModel:
    # Products as small as these are faster in float.
    options = {"backend": "eager", "own_kernels": False, "prefer": "memory"}
    target = Target.for_testing()
    return qfuse.compile(model.eval(), args, target=target, options=options, **given)  # type: ignore[arg-type]


def profile_of(fast: qfuse.CompiledModel, *inputs: torch.Tensor) -> Profile:
    return profile_plan(fast.plan, fast.runner, inputs, MACHINE, seconds=0.0)


@pytest.fixture(scope="module")
def fast() -> qfuse.CompiledModel:
    return compiled(Blocks(2), torch.randn(3, 16))


@pytest.fixture(scope="module")
def measured(fast: qfuse.CompiledModel) -> Profile:
    return profile_of(fast, torch.randn(3, 16))


def test_every_call_is_measured_once(fast: qfuse.CompiledModel, measured: Profile) -> None:
    calls = [n.name for n in fast.plan.lowered.graph.nodes if n.op == "call_function"]

    assert [name for op in measured.ops for name in op.nodes] == calls
    assert all(op.nanoseconds > 0 for op in measured.ops)
    assert measured.compiled_nanoseconds >= measured.compiled_least_nanoseconds > 0
    assert measured.rounds == 5


def test_the_method_of_a_compiled_model(fast: qfuse.CompiledModel) -> None:
    assert len(fast.profile(torch.randn(3, 16)).ops) > 10
    with pytest.raises(InputError):
        fast.profile(torch.randn(4, 16))


def test_one_stall_of_the_machine_does_not_count(fast: qfuse.CompiledModel) -> None:
    lowered = fast.plan.lowered
    clock = _Clock(lowered.module)
    calls = [n.name for n in lowered.graph.nodes if n.op == "call_function"]
    clock.nanoseconds = {name: [10**9, 10**9, 1000 + i, 10**9] for i, name in enumerate(calls)}
    ops = _ops(lowered, clock, {}, CostModel(MACHINE), as_traced=True)

    assert sum(op.nanoseconds for op in ops) == sum(1000 + i for i in range(len(calls)))


def test_nothing_is_changed(fast: qfuse.CompiledModel) -> None:
    x = torch.randn(3, 16)
    buffer = fast.plan.lowered.module.get_buffer("calls")
    before, calls = x.clone(), buffer.clone()
    random = torch.random.get_rng_state()
    profile_of(fast, x)

    assert torch.equal(x, before)
    assert torch.equal(buffer, calls)
    assert torch.equal(torch.random.get_rng_state(), random)


class WritesItsInput(nn.Module):
    """Counts in an input, and reads the row of that number: the fifth call would be out of range."""

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        row = torch.index_select(x, 0, position)
        position.add_(1)
        return row


def test_a_model_that_writes_its_input_runs_on_the_same_values_each_time() -> None:
    x, position = torch.randn(4, 8), torch.tensor([3])
    fast = compiled(WritesItsInput(), x, torch.tensor([0]))
    profile_of(fast, x, position)

    assert position.item() == 3


def test_random_ops_leave_the_random_state() -> None:
    class Noise(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand_like(x)

    x = torch.randn(4, 8)
    fast = compiled(Noise(), x, check="off")
    state = torch.random.get_rng_state()
    profile_of(fast, x)

    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_float_linear_is_costed_by_its_sizes() -> None:
    fast = compiled(nn.Linear(64, 32), torch.randn(8, 64))
    (op,) = profile_of(fast, torch.randn(8, 64)).ops

    assert op.op == "aten.linear"
    assert op.work is not None
    assert op.work.operations == 2 * 8 * 64 * 32
    assert op.work.bytes == 4 * (8 * 64 + 64 * 32 + 32 + 8 * 32)
    assert op.work.predicted > op.work.roofline > 0


@pytest.mark.parametrize(
    ("model", "shape", "operations"),
    [
        (nn.Conv2d(4, 6, 3, bias=False), (2, 4, 8, 8), 2 * (2 * 6 * 6 * 6) * (4 * 3 * 3)),
        (nn.Conv2d(4, 4, 3, groups=4), (1, 4, 8, 8), 2 * (4 * 6 * 6) * (3 * 3)),
    ],
    ids=["dense", "grouped"],
)
def test_a_convolution_is_costed_by_its_sizes(
    model: nn.Module, shape: tuple[int, ...], operations: int
) -> None:
    fast = compiled(model, torch.randn(shape))
    op = max(profile_of(fast, torch.randn(shape)).ops, key=lambda op: op.nanoseconds)

    assert op.work is not None
    assert op.work.operations == operations


def test_an_op_without_a_model_has_no_share() -> None:
    fast = compiled(nn.Softmax(-1), torch.randn(4, 8))
    (op,) = profile_of(fast, torch.randn(4, 8)).ops

    assert op.work is None
    assert op.roofline_share is op.predicted is op.bytes_per_second is None
    assert op.to_dict()["roofline_share"] is None
    assert "no op has a model" in str(profile_of(fast, torch.randn(4, 8)))


def test_views_move_nothing() -> None:
    class Views(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x.transpose(0, 1).unsqueeze(0))

    fast = compiled(Views(), torch.randn(4, 8))
    ops = profile_of(fast, torch.randn(4, 8)).ops

    assert [op.op for op in ops if op.work is not None] == ["aten.relu"]


def test_a_kernel_is_predicted_as_it_was_selected(
    fast: qfuse.CompiledModel, measured: Profile
) -> None:
    planned = {e.place.node: e.predicted for e in fast.report.fused}
    found = {op.site: op.predicted for op in measured.ops if op.site in planned}

    assert planned
    assert found == planned


def test_sizes_that_kernels_were_not_costed_with_have_no_prediction() -> None:
    rows = {"x": {0: Dim("rows", min=2, max=64)}}
    fast = compiled(Blocks(1), torch.randn(3, 16), dynamic_shapes=rows)
    same, other = (profile_of(fast, torch.randn(n, 16)) for n in (3, 5))
    sites = {e.place.node for e in fast.report.fused}

    assert sites
    assert {op.site for op in same.ops if op.work and op.site in sites} == sites
    assert not [op for op in other.ops if op.work and op.site in sites]


def test_the_share_is_the_roofline_over_the_time() -> None:
    work = OpWork(predicted=3e-6, roofline=2e-6, operations=8e3, bytes=4e3)
    op = OpTime("a", ("a",), "aten.mm", "", "", "", 4_000, work)

    assert op.roofline_share == pytest.approx(0.5)
    assert op.bytes_per_second == pytest.approx(1e9)
    assert op.operations_per_second == pytest.approx(2e9)


def test_the_work_of_several_kernels_is_their_sum() -> None:
    one = linear_work(4, 8, 16, Bits(8, 8, 32), ComputeKind.INT8)
    cost = CostModel(MACHINE)
    single, double = OpWork.of(one, cost), OpWork.of([one, one], cost)

    assert double.operations == 2 * single.operations
    assert double.predicted == pytest.approx(cost.seconds([one, one]))


@pytest.mark.parametrize(("least", "busy"), [(69, True), (70, False), (100, False)])
def test_a_busy_machine_is_named(measured: Profile, least: int, busy: bool) -> None:
    profile = replace(measured, compiled_nanoseconds=100, compiled_least_nanoseconds=least)

    assert profile.is_disturbed is busy
    assert ("the machine is busy" in str(profile)) is busy


def test_data_have_units_in_their_names(measured: Profile) -> None:
    data = json.loads(measured.to_json())

    assert data["ops_total_us"] == pytest.approx(sum(op["measured_us"] for op in data["ops"]))
    assert {"predicted_us", "gb_per_s", "gop_per_s", "roofline_share"} <= set(data["ops"][0])
    assert data["peak_bytes"] > 0


def test_text_fits_80_columns(measured: Profile) -> None:
    assert max(map(len, str(measured).splitlines())) <= 80


def test_a_copy_of_a_compiled_model_can_be_profiled(fast: qfuse.CompiledModel) -> None:
    assert copy.deepcopy(fast).profile(torch.randn(3, 16)).ops
