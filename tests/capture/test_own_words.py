"""What cannot be compiled is refused in words of its own, and with something to do."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from qfuse.capture import capture
from qfuse.ir.errors import CaptureError, TrainingError
from qfuse.passes._torch_api import new_mode


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.cond(x.sum() > 0, torch.relu, torch.neg, (x,))
        return out


class Loop(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def more(n: torch.Tensor, _x: torch.Tensor) -> torch.Tensor:
            return n < 3

        def step(n: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return n + 1, x * 2

        out: torch.Tensor = torch.while_loop(more, step, (torch.tensor(0), x))[1]  # type: ignore[no-untyped-call]
        return out


class MetaAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.ones(8, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


class Largest(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.amax()


def half_meta() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, device="meta"))


CASES = {
    "cond": (
        Branch(),
        torch.randn(2, 8),
        r"^the model calls cond, a branch that depends on .*\n  at: .*\n  do: compute both branches",
    ),
    "while_loop": (
        Loop(),
        torch.randn(2, 8),
        r"^the model calls while_loop, a loop that ends .*\n  at: .*\n  do: write out a fixed number",
    ),
    "a weight on meta": (
        half_meta(),
        torch.randn(2, 8),
        r"^1.weight is on the meta device.*\n  do: load",
    ),
    "an input on meta": (
        nn.Linear(8, 8),
        torch.randn(2, 8, device="meta"),
        r"^input is on the meta device.*\n  do: pass an example with values",
    ),
    "an attribute on meta": (
        MetaAttribute(),
        torch.randn(2, 8),
        r"^a tensor that the model uses is on the meta device(.|\n)*do: make the tensor a buffer",
    ),
    "no elements": (
        Largest(),
        torch.randn(0, 8),
        r"^the model cannot be traced with an example .*, of shape \(0, 8\)(.|\n)*do: pass an example",
    ),
}


@pytest.mark.parametrize(("model", "x", "words"), CASES.values(), ids=CASES)
def test_words(model: nn.Module, x: torch.Tensor, words: str) -> None:
    with pytest.raises(CaptureError, match=words) as raised:
        capture(model.eval(), (x,))
    assert "numpy" not in str(raised.value)


def test_an_empty_batch_that_should_vary() -> None:
    batch = torch.export.Dim("batch", min=0, max=9)
    with pytest.raises(CaptureError, match=r"of shape \(0, 8\)(.|\n)*Dim\(..., min=0\) allows"):
        capture(nn.Linear(8, 8).eval(), (torch.randn(0, 8),), dynamic_shapes={"input": {0: batch}})
    # What the message advises.
    captured = capture(
        nn.Linear(8, 8).eval(), (torch.randn(3, 8),), dynamic_shapes={"input": {0: batch}}
    )
    assert [symbol.low for symbol in captured.signature.symbols.values()] == [0]


def test_training_mode() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout())
    with pytest.raises(
        TrainingError, match=r"in training mode: 1 \(Dropout\).*\n  do: call model.eval"
    ):
        capture(model.train(), (torch.randn(2, 8),))


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({0: torch.export.Dim("b", min=2, max=3)}, "do: declare a range with the example's size 5"),
        ({0: "b"}, r"do: as in dynamic_shapes=\{"),
    ],
)
def test_dynamic_shapes_that_do_not_fit(shapes: object, words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        capture(nn.Linear(8, 8).eval(), (torch.randn(5, 8),), dynamic_shapes={"input": shapes})


def test_keywords_that_are_not_a_mapping() -> None:
    with pytest.raises(CaptureError, match=r"kwargs must be a mapping .*, got list\n  do: pass"):
        capture(nn.Linear(8, 8).eval(), (), [torch.randn(2, 8)])  # type: ignore[arg-type]


def test_a_fake_tensor_has_no_values() -> None:
    model, x = nn.Linear(8, 8).eval(), torch.randn(2, 8)
    with new_mode() as mode:
        unmade = nn.Linear(8, 8).eval()
    for case, args, name in ((model, (mode.from_tensor(x),), "input"), (unmade, (x,), "weight")):
        with pytest.raises(CaptureError, match=f"^{name} is a FakeTensor") as error:
            capture(case, args)
        assert "FakeTensorMode" in str(error.value.fix)


def test_weights_of_inference_mode_cannot_be_traced() -> None:
    with torch.inference_mode():
        model = nn.Linear(8, 8).eval()
    with pytest.raises(CaptureError, match=r"^weight was made in torch\.inference_mode") as error:
        capture(model, (torch.randn(2, 8),))
    assert "copy.deepcopy(model)" in str(error.value.fix)
    capture(copy.deepcopy(model), (torch.randn(2, 8),))


class Reshapes(nn.Module):
    def __init__(self, write: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.write(x) * 2


@pytest.mark.parametrize(
    "write", [lambda x: x.t_(), lambda x: x.set_(torch.ones(2)), lambda x: x.resize_(1, 4)]
)
def test_an_input_keeps_its_shape(write: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"^the model changes the shape, the strides") as error:
        capture(Reshapes(write), (torch.randn(2, 4),))
    assert "instead of x.t_()" in str(error.value.fix)


def test_a_model_is_not_compiled_where_tensors_have_no_values() -> None:
    model, x = nn.Linear(8, 8).eval(), torch.randn(2, 8)
    with pytest.raises(CaptureError, match="is compiled inside FakeTensorMode"), new_mode():
        capture(model, (x,))
