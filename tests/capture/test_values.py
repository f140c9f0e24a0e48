"""What a captured graph computes is what the model computes, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from tests.support.graphs.capture_models import (
    Stack,
    assert_same,
    assert_same_run,
    captured,
    module,
)
from torch import nn

from qfuse.capture import capture
from qfuse.ir.signature.run import run_flat, run_functional

pytestmark = pytest.mark.numeric


class Pair(NamedTuple):
    """An input of a model."""

    left: torch.Tensor
    right: torch.Tensor


@dataclass
class Result:
    """An output of a model."""

    logits: torch.Tensor
    extra: Any = None


torch.export.register_dataclass(Result, serialized_type_name="tests.capture.Result")


@pytest.mark.parametrize("grad", [True, False])
def test_grad_mode_makes_no_difference(grad: bool) -> None:
    model = Stack().eval()
    x = torch.randn(4, 32)
    with torch.set_grad_enabled(grad):
        program = captured(model, x)
        result = assert_same_run(program, model, torch.randn(4, 32, requires_grad=True))

    assert not result.requires_grad


def test_inference_mode() -> None:
    model = Stack().eval()
    with torch.inference_mode():
        x = torch.randn(4, 32)
        assert_same_run(captured(model, x), model, x)


def test_keywords_in_any_order_and_by_position() -> None:
    def forward(
        self: Any, x: torch.Tensor, y: torch.Tensor, *, scale: float = 2.0, z: Any = None
    ) -> Any:
        del self
        return x - y * scale + (0 if z is None else z)

    model = module(forward)
    x, y, z = torch.randn(3, 2, 5)
    program = captured(model, x, scale=3.0, y=y, z=z)

    assert_same_run(program, model, z=x, y=z, x=y, scale=3.0)
    assert_same_run(program, model, x, y, z=z, scale=3.0)
    assert [i.name for i in program.signature.inputs] == ["x", "scale", "y", "z"]


def test_nested_containers_in_and_out() -> None:
    def forward(self: Any, tree: Any, pair: Any) -> Any:
        del self
        left, (right, third) = tree["a"], tree["b"]
        return {"sum": left + right, "rest": [pair.left * third, (pair.right,)], "none": None}

    model = module(forward)

    def arguments() -> tuple[Any, Any]:
        a, b, c, d, e = torch.randn(5, 3)
        return {"a": a, "b": (b, c)}, Pair(d, e)

    program = captured(model, *arguments())
    assert_same_run(program, model, *arguments())
    tree, pair = arguments()
    assert_same_run(program, model, {"b": tree["b"], "a": tree["a"]}, pair)
    names = [i.name for i in program.signature.inputs]
    assert names == ["tree['a']", "tree['b'][0]", "tree['b'][1]", "pair.left", "pair.right"]


def test_a_dataclass_comes_back() -> None:
    model = module(lambda _self, x: Result(x + 1, {"half": x / 2}))

    result = assert_same_run(captured(model, torch.randn(3)), model, torch.randn(3))
    assert isinstance(result, Result)


def test_results_that_are_inputs_constants_or_each_other() -> None:
    def forward(self: Any, x: torch.Tensor, n: int) -> Any:
        y = x + n
        return y, x, y, n, None, "text", self.b_c, x.shape[0], y.view(-1)

    model = module(forward, b_c=torch.ones(2))
    program = captured(model, torch.randn(2, 3), 4)
    x = torch.randn(2, 3)
    _, result = run_functional(program, x, 4)

    assert_same(result, model(x, 4))
    assert result[1] is x
    assert result[0] is result[2]
    assert [o.index for o in program.signature.outputs] == [
        0, None, 0, None, None, None, 1, None, 2,
    ]  # fmt: skip


def test_variadic_arguments() -> None:
    def forward(self: Any, x: torch.Tensor, *rest: torch.Tensor, **more: torch.Tensor) -> Any:
        del self
        return x + rest[0] - rest[1] * more["scale"]

    model = module(forward)
    tensors = torch.randn(4, 3)
    program = captured(model, *tensors[:3], scale=tensors[3])
    assert_same_run(program, model, *torch.randn(3, 3), scale=torch.randn(3))
    assert [i.name for i in program.signature.inputs] == ["x", "rest[0]", "rest[1]", "scale"]


def test_one_tensor_given_twice_is_two_inputs() -> None:
    # torch.export takes both for the second one: x - y is then y - y.
    model = module(lambda _self, x, y: x - 2 * y)
    x = torch.randn(3)
    program = captured(model, x, x)
    assert_same_run(program, model, torch.randn(3), torch.randn(3))
    _, result = run_functional(program, x, x)
    assert torch.equal(result, x - 2 * x)


def test_tied_weights_are_one_constant() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> Any:
            return self.head(self.embed(ids))

    model = Tied().eval()
    program = captured(model, torch.tensor([1, 2]))

    assert [name for name, _ in program.module.named_buffers()] == ["embed.weight"]
    assert len(program.graph.find_nodes(op="get_attr")) == 1
    assert_same_run(program, model, torch.tensor([3, 4]))


def test_constants_share_memory_and_unused_ones_are_left_out() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        return self.fc(x) + self.b_used + self.plain

    model = module(
        forward,
        fc=nn.Linear(3, 3),
        spare=nn.Linear(3, 3),
        b_used=torch.randn(3),
        b_unused=torch.randn(3),
        plain=torch.randn(3),
    )
    program = captured(model, torch.randn(2, 3))
    held = dict(program.module.named_buffers())

    assert set(held) == {"fc.weight", "fc.bias", "b_used", "plain"}
    assert held["b_used"] is model.b_used
    assert held["fc.weight"].data_ptr() == model.fc.weight.data_ptr()
    assert held["plain"].data_ptr() == model.plain.data_ptr()
    # Loading other weights into the module is seen by the graph.
    with torch.no_grad():
        model.fc.weight.add_(1)
    assert_same_run(program, model, torch.randn(2, 3))


def test_layouts() -> None:
    model = module(lambda _self, x: (x.flatten(1), x * 2, x.mean(1)))
    contiguous = torch.randn(2, 3, 4, 5)
    last = contiguous.to(memory_format=torch.channels_last)
    sliced = torch.randn(4, 3, 4, 9)[::2, :, :, 1:6]
    for example in (contiguous, last, sliced):
        program = captured(model, example)
        for value in (torch.randn(2, 3, 4, 5), torch.randn(2, 5, 4, 3).transpose(1, 3)):
            assert_same_run(program, model, value)
    assert captured(model, last).signature.inputs[0].order == (0, 2, 3, 1)
    assert captured(model, sliced).signature.inputs[0].order is None


def test_ambient_autocast_is_captured_and_not_applied_again() -> None:
    model = module(lambda self, x: self.fc(x), fc=nn.Linear(32, 8))
    x = torch.randn(4, 32)
    with torch.autocast("cpu", torch.bfloat16):
        program = captured(model, x)
        want = model(x)
    plain = captured(model, x)

    assert_same(run_functional(program, x)[1], want)
    assert want.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(run_functional(program, x)[1], want)
        assert run_functional(plain, x)[1].dtype == torch.float32


def test_autocast_and_grad_regions_are_flat() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        with torch.enable_grad():
            x = x + 1
        with torch.autocast("cpu", torch.bfloat16):
            x = self.fc(x)
        with torch.no_grad():
            return x * 2

    model = module(forward, fc=nn.Linear(3, 3))
    assert_same_run(captured(model, torch.randn(2, 3)), model, torch.randn(2, 3))


def test_meta_tensors_need_no_values() -> None:
    with torch.device("meta"):
        model = Stack().eval()
        x = torch.randn(4, 32)
    program = captured(model, x)

    assert program.signature.inputs[0].device == torch.device("meta")
    (y,) = run_flat(program.module, [x])
    assert y.shape == (4, 32)
    assert y.is_meta


def test_a_data_dependent_size_stays_inside() -> None:
    model = module(lambda _self, x: x[x > 0] * 2)
    program = captured(model, torch.randn(20))
    assert_same_run(program, model, torch.randn(20))


def test_nothing_of_the_trace_is_left_for_pickle_to_trip_over() -> None:
    program = capture(Stack().eval(), (torch.randn(4, 32),))

    assert type(program.module).__name__ == "Captured"
    assert isinstance(program.module, torch.fx.GraphModule)
    assert type(program.graph._codegen) is torch.fx.graph.CodeGen
