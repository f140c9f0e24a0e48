"""What the source program writes is written where it writes it, once, and nothing else is."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from tests.backends.conftest import Pair
from torch import nn

import qfuse
from qfuse.backends import CompiledModule
from qfuse.ir.errors import InputError


def source_step(
    state: dict[str, torch.Tensor], q: torch.Tensor, pos: int, values: torch.Tensor
) -> list[torch.Tensor]:
    """The source of the decode graph, in plain torch, on its own state."""
    old = state["keys"][:, :, :2].clone()
    tail = state["tail"] * 2
    state["keys"][:, :, pos] = q[:, :, 0]
    values[:, :, pos] = q[:, :, 0] * state["gain"]
    state["steps"] += 1
    left = state["left"].clone()
    state["left"].copy_(state["right"])
    state["right"].copy_(left)
    state["base"] += 1
    scores = q @ state["keys"].transpose(2, 3)
    return [scores, old, values, tail, state["steps"].clone()]


def copied_state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = {name: value.clone() for name, value in module.named_buffers()}
    return {**state, "tail": state["base"][3:]}


@pytest.fixture(params=["aoti", "eager"])
def module(request: pytest.FixtureRequest, decode: Pair) -> tuple[CompiledModule, torch.nn.Module]:
    """A decode module on either backend, and the holder of its buffers."""
    if request.param == "aoti":
        return decode.fast, decode.graph.module
    runner = decode.plain.runner
    return decode.plain, runner.module  # type: ignore[attr-defined]


@pytest.mark.numeric
def test_steps_follow_the_source(module: tuple[CompiledModule, torch.nn.Module]) -> None:
    step, buffers = module
    state = copied_state(buffers)
    values = torch.randn(1, 2, 16, 8)
    expected_values = values.clone()
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for pos in (3, 0, 15):
        q = torch.randn(1, 2, 1, 8)
        want = source_step(state, q, pos, expected_values)
        got = step(q, torch.tensor([pos]), values)
        assert got[2] is values
        for have, expected in zip(got, want, strict=True):
            torch.testing.assert_close(have, expected)
        kept += [(have, have.clone()) for have in (got[0], got[1], got[3], got[4])]
        for name, expected in state.items():
            torch.testing.assert_close(buffers.get_buffer(name), expected, msg=name)
    # A result is the caller's: later steps do not write to it.
    for have, then in kept:
        assert torch.equal(have, then)


def test_writes_by_others_are_seen(module: tuple[CompiledModule, torch.nn.Module]) -> None:
    step, buffers = module
    step(torch.randn(1, 2, 1, 8), torch.tensor([1]), torch.zeros(1, 2, 16, 8))
    buffers.get_buffer("steps").fill_(41)
    buffers.get_buffer("keys").fill_(2.0)

    _, old, _, _, steps = step(torch.zeros(1, 2, 1, 8), torch.tensor([5]), torch.zeros(1, 2, 16, 8))

    assert steps.item() == 42
    assert torch.equal(old, torch.full((1, 2, 2, 8), 2.0))


def test_state_is_written_in_place(decode: Pair) -> None:
    addresses = {name: b.data_ptr() for name, b in decode.graph.module.named_buffers()}
    decode.fast(torch.randn(1, 2, 1, 8), torch.tensor([1]), torch.zeros(1, 2, 16, 8))

    assert addresses == {name: b.data_ptr() for name, b in decode.graph.module.named_buffers()}


def test_a_written_input_keeps_its_strides(
    module: tuple[CompiledModule, torch.nn.Module],
) -> None:
    step, _ = module
    whole = torch.zeros(2, 16, 1, 2, 8)
    values = whole[1].permute(1, 2, 0, 3)
    strides = values.stride()
    q = torch.randn(1, 2, 1, 8)

    returned = step(q, torch.tensor([4]), values)[2]

    assert returned is values
    assert values.stride() == strides
    torch.testing.assert_close(whole[1, 4, 0], q[0, :, 0] * 0.5)
    assert whole.count_nonzero() == q.count_nonzero()


def test_inputs_that_are_only_read_are_not_written(
    module: tuple[CompiledModule, torch.nn.Module],
) -> None:
    step, _ = module
    q, pos = torch.randn(1, 2, 1, 8), torch.tensor([2])
    before = q.clone(), pos.clone()
    step(q, pos, torch.zeros(1, 2, 16, 8))

    assert torch.equal(q, before[0])
    assert torch.equal(pos, before[1])


def test_refuses_an_input_that_is_the_state(decode: Pair) -> None:
    keys = decode.graph.module.get_buffer("keys")
    before = keys.clone()
    with pytest.raises(InputError, match="values shares memory with the model's own keys"):
        decode.fast(torch.randn(1, 2, 1, 8), torch.tensor([2]), keys)

    assert torch.equal(keys, before)


def test_a_deep_copy_has_its_own_state(module: tuple[CompiledModule, torch.nn.Module]) -> None:
    step, buffers = module
    before = {name: value.clone() for name, value in buffers.named_buffers()}
    other = copy.deepcopy(step)
    q, pos = torch.randn(1, 2, 1, 8), torch.tensor([0])
    first = other(q, pos, torch.zeros(1, 2, 16, 8))
    second = other(q, pos, torch.zeros(1, 2, 16, 8))

    assert [first[4].item(), second[4].item()] == [1, 2]
    assert torch.equal(second[1][:, :, :1], q)
    # `tail` is a view of `base` in the copy too: the second call sees what the first one wrote.
    assert torch.equal(second[3], first[3] + 2)
    for name, value in buffers.named_buffers():
        assert torch.equal(value, before[name]), name


class Keeps(nn.Module):
    """A part of a model that writes a buffer and never reads it."""

    kept: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.copy_(x)
        return x * 2


def test_a_buffer_that_is_only_written(tmp_path: Path) -> None:
    part, x = Keeps(), torch.ones(4)
    model = nn.Sequential(nn.Sequential(part), nn.ReLU()).eval()
    fast = qfuse.compile(model, (x,), check="site", options={"backend": "eager"})
    fast.save(tmp_path / "model.qfuse")
    others = (
        copy.deepcopy(fast),
        pickle.loads(pickle.dumps(fast)),
        qfuse.load(tmp_path / "model.qfuse"),
    )
    for other in others:
        assert torch.equal(other(3 * x), 6 * x)
        (written,) = other.runner.written([])
        assert torch.equal(written, 3 * x)
    assert torch.equal(part.kept, torch.zeros(4))
    fast(x)
    assert torch.equal(part.kept, x)
