"""The graph writes nothing; what the source writes is written where the source writes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.graphs.capture_models import (
    assert_same,
    assert_same_run,
    captured,
    check_graph,
    module,
)
from torch import nn

from qfuse.capture import capture
from qfuse.ir.errors import CaptureError, InputError
from qfuse.ir.graph.stage_graph import Mutation, constant_of
from qfuse.ir.signature.run import run_flat, run_functional

pytestmark = pytest.mark.numeric


def cache_model() -> Any:
    def forward(self: Any, x: torch.Tensor, position: torch.Tensor) -> Any:
        self.b_keys.index_copy_(0, position, self.fc(x))
        self.b_steps.add_(1)
        return self.b_keys.sum(0) * self.b_steps

    return module(
        forward,
        fc=nn.Linear(4, 4),
        b_keys=torch.zeros(8, 4),
        b_steps=torch.zeros((), dtype=torch.int64),
    )


def test_a_cache_buffer_is_written_in_the_users_module() -> None:
    torch.manual_seed(0)
    model, twin = cache_model(), cache_model()
    twin.load_state_dict(model.state_dict())
    program = captured(model, torch.randn(2, 4), torch.tensor([0, 1]))

    assert not model.b_keys.any(), "capture wrote the cache"
    assert {m.buffer for m in program.signature.mutations} == {"b_keys", "b_steps"}
    assert [m.output for m in program.signature.mutations] == [0, 1]
    for step in range(3):
        x, position = torch.randn(2, 4), torch.tensor([2 * step, 2 * step + 1])
        written, result = run_functional(program, x, position)
        with torch.no_grad():
            want = twin(x, position)
        assert_same(result, want)
        assert_same(dict(model.named_buffers()), dict(twin.named_buffers()))
        names = [str(m.buffer) for m in program.signature.mutations]
        assert_same(dict(zip(names, written, strict=True)), {n: getattr(twin, n) for n in names})


def test_mutated_buffers_are_no_constants() -> None:
    program = captured(cache_model(), torch.randn(2, 4), torch.tensor([0, 1]))
    kinds = {
        str(n.target): (n.meta.get("qfuse_mutable", False), constant_of(n) is None)
        for n in program.graph.find_nodes(op="get_attr")
    }
    assert kinds == {
        "fc.weight": (False, False),
        "fc.bias": (False, False),
        "b_keys": (True, True),
        "b_steps": (True, True),
    }


def test_running_the_graph_itself_writes_nothing() -> None:
    model = cache_model()
    program = captured(model, torch.randn(2, 4), torch.tensor([0, 1]))
    outputs = run_flat(program.module, [torch.randn(2, 4), torch.tensor([0, 1])])

    assert len(outputs) == 3
    assert not model.b_keys.any()


def test_a_buffer_that_is_only_written_is_kept() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        self.b_last.copy_(x)
        return x + 1

    model = module(forward, b_last=torch.zeros(3))
    program = captured(model, torch.randn(3))
    x = torch.randn(3)
    run_functional(program, x)
    assert torch.equal(model.b_last, x)


def test_a_buffer_that_is_assigned_is_written() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        self.b_mean = 0.5 * self.b_mean + x
        return self.b_mean * 2

    model = module(forward, b_mean=torch.ones(3))
    program = captured(model, torch.randn(3))
    _, result = run_functional(program, torch.zeros(3))
    assert_same(model.b_mean, torch.full((3,), 0.5))
    assert_same(result, torch.ones(3))


def test_a_parameter_that_is_written() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        self.w.add_(1)
        return x * self.w

    model = module(forward, w=nn.Parameter(torch.ones(3)))
    program = captured(model, torch.randn(3))
    _, result = run_functional(program, torch.ones(3))
    assert_same(result, torch.full((3,), 2.0))
    assert_same(model.w.detach(), torch.full((3,), 2.0))


def test_inputs_are_written_and_returned_as_themselves() -> None:
    def forward(self: Any, state: Any, x: torch.Tensor) -> Any:
        del self
        state["a"].add_(x)
        state["b"].view(-1).mul_(2)
        return state["a"], state["b"] + 1, x

    model = module(forward)

    def arguments() -> tuple[Any, torch.Tensor]:
        return {"a": torch.randn(3), "b": torch.randn(2, 2)}, torch.randn(3)

    program = captured(model, *arguments())
    assert_same_run(program, model, *arguments())
    assert program.signature.mutations == (
        Mutation(0, input_index=0),
        Mutation(1, input_index=1),
    )
    state, x = arguments()
    _, result = run_functional(program, state, x)
    assert result[0] is state["a"]
    assert result[2] is x


@pytest.mark.parametrize("copies", [False, True])
def test_an_input_is_itself_through_a_cast_that_does_nothing(copies: bool) -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        del self
        same = x.to(torch.float64 if copies else x.dtype).to(x.device).contiguous()
        same.add_(1)
        return same

    program = captured(module(forward), torch.randn(3))
    x = torch.zeros(3)
    _, result = run_functional(program, x)
    assert (result is x) == (not copies)
    assert torch.equal(result, torch.ones_like(result))
    assert torch.equal(x, torch.full((3,), 1.0 - copies))


def test_a_copy_into_an_input_is_not_that_input() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        del self
        y = x + 1
        x.copy_(y)
        return y

    program = captured(module(forward), torch.randn(3))
    x = torch.randn(3)
    _, result = run_functional(program, x)
    assert result is not x
    assert torch.equal(result, x)
    assert program.signature.outputs[0].input_index is None


def test_values_from_before_a_write_stay() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        before = self.b_state.clone()
        self.b_state.copy_(x)
        return before

    model = module(forward, b_state=torch.zeros(3))
    program = captured(model, torch.randn(3))
    _, result = run_functional(program, torch.ones(3))
    assert_same(result, torch.zeros(3))


def test_swapped_buffers() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        left = self.b_left.clone()
        self.b_left.copy_(self.b_right)
        self.b_right.copy_(left)
        return x + self.b_left

    model = module(forward, b_left=torch.zeros(3), b_right=torch.ones(3))
    program = captured(model, torch.randn(3))
    # What a rewrite may leave: the clone is gone, and each value is the other buffer itself.
    for clone in program.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
        clone.replace_all_uses_with(clone.args[0])
        program.graph.erase_node(clone)
    program.module.recompile()
    check_graph(program)
    written, result = run_functional(program, torch.zeros(3))

    assert_same(model.b_left, torch.ones(3))
    assert_same(model.b_right, torch.zeros(3))
    assert_same(written, (torch.ones(3), torch.zeros(3)))
    assert_same(result, torch.ones(3))


def test_an_input_that_is_written_must_not_overlap_another() -> None:
    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        del self
        x.add_(1)
        return x + y

    program = captured(module(forward), torch.randn(4), torch.randn(4))
    storage = torch.randn(10)
    with pytest.raises(InputError, match=r"x shares memory with y, and the model writes it"):
        run_functional(program, storage[:4], storage[2:6])
    assert_same_run(program, module(forward), storage[:4], storage[4:8])


def test_buffers_that_share_memory_cannot_be_written() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        self.b_all.add_(1)
        return x + self.b_row

    memory = torch.ones(4, 4)
    model = module(forward, b_all=memory, b_row=memory[0])
    with pytest.raises(CaptureError, match="forward writes b_all, which shares memory with b_row"):
        capture(model, (torch.randn(4),))


def test_a_written_tensor_must_be_a_buffer_and_stays_as_it_was() -> None:
    # torch.export carries such writes out, once per trace, on the user's tensor.
    def forward(self: Any, x: torch.Tensor) -> Any:
        self.direct.add_(1)
        self.nested["deep"][0].add_(1)
        return x + self.direct

    model = module(forward, direct=torch.ones(3), nested={"deep": [torch.ones(3)]})
    with pytest.raises(CaptureError, match=r"forward writes .* that is not a buffer") as e:
        capture(model, (torch.randn(3),))

    assert "self.register_buffer('" in str(e.value)
    assert_same(model.direct, torch.ones(3))
    assert_same(model.nested["deep"][0], torch.ones(3))


class _Box:
    """Holds tensors, and is neither a module nor a container that torch knows."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.__dict__.update(tensors)


def boxed_model() -> Any:
    """A model that writes its buffers through a plain object that holds them too."""

    def forward(self: Any, x: torch.Tensor, position: torch.Tensor) -> Any:
        self.box.keys.index_copy_(0, position, self.fc(x))
        self.box.steps.add_(1)
        return self.box.keys.sum(0) * self.box.steps

    model = module(
        forward,
        fc=nn.Linear(4, 4),
        b_keys=torch.zeros(8, 4),
        b_steps=torch.zeros((), dtype=torch.int64),
    )
    model.box = _Box(keys=model.b_keys, steps=model.b_steps)
    return model


def test_a_buffer_that_a_plain_object_holds_too_is_written() -> None:
    torch.manual_seed(0)
    model, twin = boxed_model(), boxed_model()
    twin.load_state_dict(model.state_dict())
    program = captured(model, torch.randn(2, 4), torch.tensor([0, 1]))

    assert not model.b_keys.any(), "capture wrote the cache"
    assert model.b_steps == 0
    assert {m.buffer for m in program.signature.mutations} == {"b_keys", "b_steps"}
    for step in range(3):
        x, position = torch.randn(2, 4), torch.tensor([2 * step, 2 * step + 1])
        _, result = run_functional(program, x, position)
        with torch.no_grad():
            assert_same(result, twin(x, position))
        assert_same(dict(model.named_buffers()), dict(twin.named_buffers()))


def test_a_tensor_that_only_a_plain_object_holds_is_an_error() -> None:
    model = boxed_model()
    model.box = _Box(keys=torch.zeros(8, 4), steps=model.b_steps)
    with pytest.raises(CaptureError, match="a tensor that is not a buffer"):
        capture(model, (torch.randn(2, 4), torch.tensor([0, 1])))


def test_buffers_without_a_tensor_and_one_that_is_written() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        self.b_count.add_(1)
        return x + self.b_count if self.b_first is None and self.b_second is None else x

    state = {"b_first": None, "b_second": None, "b_count": torch.zeros(4), "b_last": None}
    model, twin = module(forward, **state), module(forward, **state)
    twin.b_count = twin.b_count.clone()
    program = captured(model, torch.ones(2, 4))

    assert list(model._buffers) == list(state)
    assert not {"b_first", "b_second", "b_last"} & set(vars(model))
    _, result = run_functional(program, torch.ones(2, 4))
    assert_same(result, twin(torch.ones(2, 4)))
    assert_same(model.b_count, twin.b_count)
