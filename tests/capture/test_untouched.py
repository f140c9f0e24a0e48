"""Capture leaves the model, the example and the process as they were."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from tests.support.graphs.capture_models import Stack, assert_same, captured, module
from torch import nn

from qfuse.capture import capture
from qfuse.ir.errors import CaptureError
from qfuse.ir.events import Noted


def test_state_flags_hooks_gradients_and_versions() -> None:
    model = Stack()  # Training mode, but no module acts differently there.
    model.register_buffer("count", torch.zeros(3))
    calls: list[str] = []
    model.blocks[0].register_forward_hook(lambda *_: calls.append("hook"))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = copy.deepcopy(model.state_dict())
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    identity = [(id(t), t._version, t.requires_grad) for t in tensors if t is not None]
    attributes = {name: dict(vars(m)) for name, m in model.named_modules()}
    random = torch.random.get_rng_state()

    x = torch.randn(2, 32, requires_grad=True)
    kept, random = x.detach().clone(), torch.random.get_rng_state()
    captured(model, x)

    assert_same(model.state_dict(), before)
    assert identity == [(id(t), t._version, t.requires_grad) for t in tensors if t is not None]
    assert model.training
    assert all(m.training for m in model.modules())
    for name, m in model.named_modules():
        assert {k: id(v) for k, v in vars(m).items()} == {
            k: id(v) for k, v in attributes[name].items()
        }
    assert torch.equal(torch.random.get_rng_state(), random)
    assert torch.equal(x, kept)
    assert x.requires_grad
    assert x._version == 0
    assert x.grad is None


def test_the_example_is_not_written() -> None:
    def forward(self: Any, state: Any, x: torch.Tensor) -> Any:
        del self
        state["seen"].add_(x)
        state["new"] = x
        return state["seen"] * 2

    state = {"seen": torch.zeros(3), "new": torch.zeros(3)}
    captured(module(forward), state, torch.ones(3))
    assert_same(state, {"seen": torch.zeros(3), "new": torch.zeros(3)})
    assert state["seen"]._version == 0


def test_attributes_that_forward_sets_are_taken_back_and_noted() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        self.last = x
        self.previous = x + 1
        self.count += 1
        self.history.append(self.count)
        return x * self.count

    old = torch.zeros(3)
    model = module(forward, previous=old, count=0, history=[])
    program = captured(model, torch.randn(3))

    assert not hasattr(model, "last")
    assert model.previous is old
    assert model.count == 0
    assert model.history == []
    (note,) = program.log.of(Noted)
    assert note.warn
    assert "self.last" in note.text
    assert "A compiled model does not assign" in note.text


def test_a_failed_capture_takes_everything_back() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        self.last = x
        self.loose.add_(1)
        self.b_state.add_(1)
        raise ValueError("stop here")

    model = module(forward, loose=torch.zeros(3), b_state=torch.zeros(3))
    with pytest.raises(CaptureError, match="stop here"):
        capture(model, (torch.randn(3),))

    assert not hasattr(model, "last")
    assert torch.equal(model.loose, torch.zeros(3))
    assert torch.equal(model.b_state, torch.zeros(3))
    assert type(model.b_state) is torch.Tensor


def test_warnings_of_the_model_are_passed_on_and_those_of_torch_are_not() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        del self
        warnings.warn("from the model", UserWarning, stacklevel=1)
        return x + 1

    with pytest.warns(UserWarning, match="from the model") as caught:
        captured(module(forward), torch.randn(3))
    assert len(caught) == 1
    # Any other warning is an error in this test suite.
    captured(Stack().eval(), torch.randn(2, 32))


def test_global_state_is_left_alone() -> None:
    filters = list(warnings.filters)
    captured(module(lambda _self, x: torch.rand(3) + x), torch.randn(3))
    with pytest.raises(CaptureError):
        capture(module(lambda _self, x: x.numpy()), (torch.randn(3),))

    assert warnings.filters == filters
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Dropout(0.1), r"the model is in training mode: act \(Dropout\)"),
        (nn.BatchNorm1d(4), r"act \(BatchNorm1d\) acts differently"),
        (nn.RReLU(), r"act \(RReLU\)"),
    ],
)
def test_training_mode_is_refused(layer: nn.Module, message: str) -> None:
    model = module(lambda self, x: self.act(x), act=layer).train()
    with pytest.raises(CaptureError, match=message) as error:
        capture(model, (torch.randn(3, 4),))
    assert error.value.fix == "call model.eval() first"
    assert model.training

    captured(model.eval(), torch.randn(3, 4))


@pytest.mark.parametrize(
    "layer", [nn.Dropout(0.0), nn.LayerNorm(4), nn.BatchNorm1d(4, track_running_stats=False)]
)
def test_training_mode_that_makes_no_difference_is_fine(layer: nn.Module) -> None:
    model = module(lambda self, x: self.act(x), act=layer).train()

    program = captured(model, torch.randn(3, 4))
    assert [spec.shape for spec in program.signature.inputs] == [(3, 4)]
    assert model.training


def test_functional_dropout_follows_the_mode() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        return nn.functional.dropout(x, 0.5, training=self.training)

    with pytest.raises(CaptureError, match="dropout was captured in training mode") as error:
        capture(module(forward).train(), (torch.randn(3),))
    assert error.value.where is not None
    assert "nn.functional.dropout(x, 0.5" in error.value.where
    assert "call model.eval()" in str(error.value.fix)
    assert not captured(module(forward), torch.randn(3)).log.events


def test_an_exported_module_in_training_mode() -> None:
    model = module(lambda self, x: self.drop(x), drop=nn.Dropout(0.5)).train()
    exported = torch.export.export(model, (torch.randn(4),)).module()
    with pytest.raises(CaptureError, match="was captured in training mode") as error:
        capture(exported, (torch.randn(4),))
    assert "move_exported_model_to_eval(model)" in str(error.value.fix)


def test_random_numbers_on_purpose_are_a_warning() -> None:
    model = module(lambda _self, x: nn.functional.dropout(x, 0.5, training=True) + torch.rand(3))
    texts = [event.text for event in captured(model, torch.randn(3)).log.of(Noted)]

    assert len(texts) == 2
    assert all("draws random numbers" in text for text in texts)


def test_recurrent_layers_in_eval_mode_draw_nothing() -> None:
    model = module(
        lambda self, x: self.gru(self.lstm(x)[0])[0],
        lstm=nn.LSTM(4, 4, 2, dropout=0.3),
        gru=nn.GRU(4, 4, 2, dropout=0.3),
    )
    texts = [event.text for event in captured(model, torch.randn(3, 2, 4)).log.of(Noted)]
    assert not [text for text in texts if "random" in text]
