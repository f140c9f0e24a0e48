"""A compiled model takes the place of its source in another module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import qfuse
from qfuse import CompiledModel, CompiledModelError
from qfuse.passes._torch_api import new_mode
from qfuse.targets import Target


class Model(nn.Module):
    """A model with a part that is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.encoder(x))
        return out


class Counter(nn.Module):
    """A model that counts its calls."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return x + self.count


def compiled(model: nn.Module, *args: torch.Tensor) -> CompiledModel:
    return qfuse.compile(
        model.eval(), args, options={"backend": "eager"}, target=Target.for_testing()
    )


@pytest.fixture
def model() -> Model:
    made = Model().eval()
    made.encoder = compiled(made.encoder, torch.randn(3, 8))
    return made


def test_a_submodule_is_replaced() -> None:
    model, x = Model().eval(), torch.randn(3, 8)
    want = model(x)
    model.encoder = compiled(model.encoder, x)

    assert isinstance(model.encoder, nn.Module)
    assert dict(model.named_modules())["encoder"] is model.encoder
    torch.testing.assert_close(model(x), want)


def test_it_holds_no_parameters(model: Model) -> None:
    assert not list(model.encoder.parameters())
    assert not list(model.encoder.buffers())
    assert [name for name, _ in model.named_parameters()] == ["head.weight", "head.bias"]


def test_eval_mode_stays(model: Model) -> None:
    assert model.eval() is model
    assert model.train(mode=False) is model
    assert not model.encoder.training
    with pytest.raises(
        CompiledModelError, match=r"cannot be trained\n  do: train the source model"
    ):
        model.train()
    assert not model.encoder.training


SAME: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to a device": lambda m: m.to("cpu"),
    "to a dtype": lambda m: m.to(torch.float32),
    "cpu": lambda m: m.cpu(),
    "float": lambda m: m.float(),
    "channels last": lambda m: m.to(memory_format=torch.channels_last),  # type: ignore[call-overload]
}


@pytest.mark.parametrize("convert", SAME.values(), ids=SAME)
def test_a_conversion_that_changes_nothing(
    model: Model, convert: Callable[[nn.Module], nn.Module]
) -> None:
    x = torch.randn(3, 8)
    want = model(x)

    assert torch.equal(convert(model)(x), want)


OTHER: dict[str, Callable[[nn.Module], nn.Module]] = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "to a dtype": lambda m: m.to(torch.bfloat16),
    "to a device": lambda m: m.to("meta"),
    "to an accelerator": lambda m: m.to("cuda"),
    "cuda": lambda m: m.cuda(),
}


@pytest.mark.parametrize("convert", OTHER.values(), ids=OTHER)
def test_a_conversion_is_refused(model: Model, convert: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(CompiledModelError, match=r"moved or converted.*\n  do: convert the source"):
        convert(model.encoder)
    # Asked of the module around it, it is refused too.
    with pytest.raises(CompiledModelError, match=r"moved or converted.*\n  do: convert the source"):
        convert(nn.Sequential(model.encoder))


def test_a_model_of_bfloat16_may_stay_so() -> None:
    fast = compiled(nn.Linear(4, 4).bfloat16(), torch.randn(2, 4, dtype=torch.bfloat16))

    assert fast.to(torch.bfloat16) is fast
    with pytest.raises(CompiledModelError, match=r"to torch.float32 on cpu"):
        fast.float()


def test_weights_are_neither_read_nor_loaded(model: Model) -> None:
    weights = Model().state_dict()
    for part in (model, model.encoder):
        with pytest.raises(CompiledModelError, match=r"state_dict.*\n  do: save the state_dict of"):
            part.state_dict()
        with pytest.raises(CompiledModelError, match=r"loaded with other weights"):
            part.load_state_dict(weights, strict=False)


def test_forward_hooks_run(model: Model) -> None:
    x, seen = torch.randn(3, 8), list[str]()
    plain = model.encoder(x)
    pre = model.encoder.register_forward_pre_hook(lambda _m, args: (args[0] * 2,))

    def after(_module: nn.Module, _args: object, out: torch.Tensor) -> torch.Tensor:
        seen.append("out")
        return out + 1

    post = model.encoder.register_forward_hook(after)

    want = model.encoder.forward(x * 2) + 1
    assert torch.equal(model.encoder(x), want)
    assert seen == ["out"]
    pre.remove()
    post.remove()
    assert torch.equal(model.encoder(x), plain)


@pytest.mark.parametrize(
    "name",
    ["register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook"],
)
def test_backward_hooks_are_refused(model: Model, name: str) -> None:
    with pytest.raises(CompiledModelError, match=r"no backward pass"):
        getattr(model.encoder, name)(lambda *_: None)


def test_a_copy_of_the_model_around_has_its_own_state() -> None:
    x = torch.zeros(1)
    model = nn.Sequential(compiled(Counter(), x))
    calls: list[Any] = []
    model[0].register_forward_hook(lambda *_: calls.append(None))
    other = copy.deepcopy(model)
    model(x)

    # The example call counts nothing.
    assert model(x).item() == 2
    assert other(x).item() == 1
    assert len(calls) == 3
    handle = other[0].register_forward_hook(lambda *_: calls.append(None))
    model(x)
    assert len(calls) == 4
    handle.remove()


def test_the_model_around_prints_one_line_for_it(model: Model) -> None:
    (line,) = (line for line in repr(model).splitlines() if "encoder" in line)
    assert line == f"  (encoder): {model.encoder!r}"
    assert "CompiledModel(input): 0 quantized ops on kernels" in line


def test_a_model_with_a_compiled_part_is_not_compiled_again(model: Model) -> None:
    x = torch.randn(3, 8)
    with pytest.raises(qfuse.CaptureError, match=r"^encoder was compiled by qfuse already"):
        qfuse.compile(model, (x,))
    with pytest.raises(qfuse.CaptureError, match=r"^the model was compiled by qfuse already"):
        qfuse.explain(model.encoder, (x,))


def in_fake_mode(fast: CompiledModel, x: torch.Tensor) -> object:
    with new_mode():
        return fast(x)


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (in_fake_mode, "FakeTensorMode"),
        (lambda fast, x: make_fx(fast)(x), "ProxyTorchDispatchMode"),
        (lambda fast, x: torch.vmap(fast)(x[None]), r"a transform of torch\.func"),
        (
            lambda fast, x: torch.func.grad(lambda v: fast(v).sum())(x),
            r"a transform of torch\.func",
        ),
        (lambda fast, x: torch.export.export(fast, (x,)), "FakeTensorMode"),
    ],
)
def test_it_is_not_traced_or_transformed(
    call: Callable[[CompiledModel, torch.Tensor], object], what: str
) -> None:
    """Compiled code would read the memory of tensors that have none, which ends the process."""
    fast, x = compiled(nn.Linear(8, 8), torch.randn(3, 8)), torch.randn(3, 8)
    with pytest.raises(CompiledModelError, match=f"this call is inside {what}") as error:
        call(fast, x)
    assert "the source model" in str(error.value.fix)


def test_modes_that_count_do_not_matter() -> None:
    fast, x = compiled(nn.Linear(8, 8), torch.randn(3, 8)), torch.randn(3, 8)
    want = fast(x)
    with FlopCounterMode(display=False) as counter:
        assert torch.equal(fast(x), want)
    assert counter.get_total_flops() > 0
