"""A buffer that the model writes and returns is a tensor of its own, not what was written into it.

The functional graph has the written value in its place. That may be an input of the caller, a
constant, or another result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.graphs.capture_models import captured, module

import qfuse
from qfuse.capture import capture
from qfuse.ir.errors import CaptureError
from qfuse.ir.signature.run import run_functional

pytestmark = pytest.mark.numeric

Forward = Callable[[Any, torch.Tensor], Any]


def of_an_input(self: Any, x: torch.Tensor) -> Any:
    self.b_state.copy_(x)
    return x * 2, self.b_state


def of_an_input_that_is_written_later(self: Any, x: torch.Tensor) -> Any:
    self.b_state.copy_(x)
    x.add_(1)
    return x * 2, self.b_state


def of_a_constant(self: Any, x: torch.Tensor) -> Any:
    self.b_state.copy_(self.b_start)
    return x + self.b_state, self.b_state


def of_another_result(self: Any, x: torch.Tensor) -> Any:
    y = x * 2
    self.b_state.copy_(y)
    return y, self.b_state


def views(self: Any, x: torch.Tensor) -> Any:
    y = x * 2
    self.b_state.copy_(y)
    return y, self.b_state[:1], self.b_state.t()


def of_a_view_of_an_input(self: Any, x: torch.Tensor) -> Any:
    self.b_state.copy_(x.t().t())
    return self.b_state.view(-1)


def in_part(self: Any, x: torch.Tensor) -> Any:
    self.b_state[:1].copy_(x[:1])
    return self.b_state, x * 2


def by_a_view_of_all(self: Any, x: torch.Tensor) -> Any:
    self.b_state[:].copy_(x)
    return x * 2, self.b_state


def of_an_input_in_part(self: Any, x: torch.Tensor) -> Any:
    x[:1].add_(self.b_start[:1])
    return x.clone(), x * 2


def parts(self: Any, x: torch.Tensor) -> Any:
    self.b_state.copy_(self.b_start)
    return x + self.b_start, self.b_state.split(1)[0], self.b_state.unbind(0)[1]


def to_two_buffers(self: Any, x: torch.Tensor) -> Any:
    self.b_state.copy_(x)
    self.b_start.copy_(self.b_state)
    return x * 2, self.b_state, self.b_start


def assigned(self: Any, x: torch.Tensor) -> Any:
    self.b_state = x
    return x * 2


CASES = [
    of_an_input,
    of_an_input_that_is_written_later,
    of_a_constant,
    of_another_result,
    views,
    of_a_view_of_an_input,
    in_part,
    by_a_view_of_all,
    of_an_input_in_part,
    parts,
]


def model_of(forward: Forward) -> Any:
    start = torch.arange(6.0).reshape(2, 3)
    return module(forward, b_state=torch.zeros(2, 3), b_start=start)


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def check(call: Callable[[torch.Tensor], Any], model: Any, source: Any) -> None:
    """Two calls whose results are overwritten in between."""
    for step in range(2):
        x = torch.arange(6.0).reshape(2, 3) + step
        twin = x.clone()
        found, expected = call(x), source(twin)
        found = found if isinstance(found, tuple) else (found,)
        expected = expected if isinstance(expected, tuple) else (expected,)

        assert torch.equal(x, twin)
        for result, want in zip(found, expected, strict=True):
            assert torch.equal(result, want)
        held = {memory_of(t) for t in (x, model.b_start, model.b_state)}
        assert not {memory_of(result) for result in found} & held
        # The first result and the buffer are two tensors in each model but the one that returns
        # views of one buffer.
        first, last = found[0], found[-1]
        assert first is last or memory_of(first) != memory_of(last)
        for result in found:
            result.fill_(100.0)
        assert torch.equal(x, twin)


@pytest.mark.parametrize("forward", CASES)
def test_captured(forward: Forward) -> None:
    model = model_of(forward)
    program = captured(model, torch.zeros(2, 3))

    check(lambda x: run_functional(program, x)[1], model, model_of(forward))


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.filterwarnings("ignore:erase_node:UserWarning")  # of torch 2.14
@pytest.mark.parametrize("forward", CASES)
def test_captured_from_a_functional_program(forward: Forward) -> None:
    model = model_of(forward)
    exported = torch.export.export(model, (torch.zeros(2, 3),)).run_decompositions({})
    program = capture(exported)

    check(lambda x: run_functional(program, x)[1], model, model_of(forward))


def test_a_buffer_that_is_returned_twice_is_one_tensor() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        self.b_state.copy_(x)
        return self.b_state, self.b_state

    program = captured(model_of(forward), torch.zeros(2, 3))

    first, second = run_functional(program, torch.ones(2, 3))[1]
    assert first is second


@pytest.mark.parametrize("forward", CASES)
def test_compiled_op_by_op(forward: Forward) -> None:
    model = model_of(forward)
    fast = qfuse.compile(model, (torch.zeros(2, 3),), options={"backend": "eager"})

    check(fast, model, model_of(forward))


@pytest.mark.compiler
@pytest.mark.parametrize(
    "forward",
    [
        of_an_input_that_is_written_later,
        pytest.param(of_another_result, marks=pytest.mark.thorough),
        pytest.param(in_part, marks=pytest.mark.thorough),
        of_an_input_in_part,
    ],
)
def test_compiled(forward: Forward) -> None:
    model = model_of(forward)
    fast = qfuse.compile(model, (torch.zeros(2, 3),))

    assert fast.backend == "aoti"
    check(fast, model, model_of(forward))


@pytest.mark.parametrize("forward", [to_two_buffers, assigned])
def test_what_torch_cannot_capture(forward: Forward) -> None:
    """Both are errors of torch, whose words say nothing about buffers; a clone avoids them."""
    with pytest.raises(CaptureError, match="torch cannot capture a value that is written") as error:
        captured(model_of(forward), torch.zeros(2, 3))
    assert "self.buffer.copy_(value.clone())" in str(error.value)
