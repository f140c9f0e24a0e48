"""What cannot be captured is refused with the user's line and something to do."""

from __future__ import annotations

import linecache
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.graphs.capture_models import Block, module
from torch import nn

from qfuse.capture import capture
from qfuse.capture.diagnose import capture_error
from qfuse.ir.errors import CaptureError


def branch(self: Any, x: torch.Tensor) -> torch.Tensor:
    del self
    if x.sum() > 0:  # here
        return x + 1
    return x


def size(self: Any, x: torch.Tensor) -> torch.Tensor:
    del self
    n = int(x.max().item())  # here
    return torch.ones(n)


def leaves_torch(self: Any, x: torch.Tensor) -> torch.Tensor:
    del self
    return torch.from_numpy(np.tanh(x.numpy()))  # here


def no_attribute(self: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = self.nope(x)  # here
    return result


def no_shape(self: Any, x: torch.Tensor) -> torch.Tensor:
    del self
    return x @ torch.ones(7, 7)  # here


def helper(x: torch.Tensor) -> float:
    return {"a": 1.0}[str(x.ndim)]  # here


def deep(self: Any, x: torch.Tensor) -> torch.Tensor:
    del self
    return x * helper(x)


def asserts(self: Any, x: torch.Tensor) -> torch.Tensor:
    del self
    assert x.ndim == 7, "seven axes, please"  # here
    return x


def conditional(self: Any, x: torch.Tensor) -> torch.Tensor:
    del self
    result: torch.Tensor = torch.cond(  # here
        x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)
    )
    return result


@pytest.mark.parametrize(
    ("forward", "what", "fix"),
    [
        (branch, "depends on the values of a tensor", "torch.where"),
        (size, "depends on the values of a tensor", "torch.where"),
        (leaves_torch, "RuntimeError: .numpy()", "numpy"),
        (no_attribute, "'Made' object has no attribute 'nope'", "check that the model runs"),
        (no_shape, "same reduction dim", "check that the model runs"),
        (deep, "KeyError: '2'", "check that the model runs"),
        (asserts, "AssertionError: seven axes, please", "check that the model runs"),
        (conditional, "the model calls cond", "torch.where"),
    ],
)
def test_the_line_and_the_fix(forward: Any, what: str, fix: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(module(forward), (torch.randn(4, 4),))

    error = caught.value
    assert what in error.what
    assert error.fix is not None
    assert fix in error.fix
    assert error.where is not None
    file, line, code = error.where.split(":", maxsplit=2)
    assert file == __file__
    assert linecache.getline(__file__, int(line)).strip().startswith(code.strip())
    assert "# here" in code
    assert "draft_export" not in str(error)
    assert "TORCH_LOGS" not in str(error)
    assert (error.__cause__ is None) == (forward is conditional)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.block(x[:, :3])


def test_the_line_is_the_deepest_of_the_users() -> None:
    # Raised in torch.nn.Linear, which Block calls, which Outer calls.
    with pytest.raises(CaptureError) as error:
        capture(Outer().eval(), (torch.randn(2, 4),))
    assert "h = torch.relu(self.up(x))" in str(error.value.where)


@pytest.mark.parametrize(
    ("message", "fix"),
    [
        ("Constant tensor lifted_tensor_0 is not in the constants dictionary.", "use_cache=False"),
        ("expected sympy.Symbol", "before it is saved"),
    ],
)
def test_mistakes_of_torch_have_a_way_around(message: str, fix: str) -> None:
    error = capture_error(AssertionError(message), "making the graph functional")
    assert error.what == f"making the graph functional failed with AssertionError: {message}"
    assert fix in str(error.fix)
    assert error.where is None


def test_an_exception_of_the_users_own_class_is_passed_on() -> None:
    class OwnError(Exception):
        pass

    def forward(self: Any, x: torch.Tensor) -> Any:
        del self
        raise OwnError(x.shape)

    with pytest.raises(OwnError):
        capture(module(forward), (torch.randn(2),))


class Opaque:
    """A container that torch does not know."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (
            (),
            {},
            r"no example inputs, and Made.forward needs them: missing a required argument: 'x'",
        ),
        ((torch.ones(2), 1, 2), {}, "too many positional arguments"),
        ((torch.ones(2),), {"z": 1}, "got an unexpected keyword argument 'z'"),
        ((torch.ones(2), Opaque()), {}, "y is an Opaque: inputs are tensors, numbers"),
        ((torch.ones(2), {"k": [np.ones(2)]}), {}, r"y\['k'\]\[0\] is an ndarray"),
        ((torch.ones(2).to_sparse(),), {}, "x is a Tensor of layout torch.sparse_coo"),
        (torch.ones(2), {}, "args must be a tuple of the arguments of forward, got Tensor"),
    ],
)
def test_examples_that_cannot_be_inputs(args: Any, kwargs: Any, message: str) -> None:
    model = module(lambda _self, x, y=None: x if y is None else x + 1)
    with pytest.raises(CaptureError, match=message) as error:
        capture(model, args, kwargs)
    assert error.value.fix


def test_results_that_no_graph_returns() -> None:
    with pytest.raises(CaptureError, match="Opaque") as error:
        capture(module(lambda _self, x: Opaque(x)), (torch.ones(2),))
    assert "register_dataclass" in str(error.value.fix)


def test_a_function_is_no_model() -> None:
    with pytest.raises(CaptureError, match="the model is a function"):
        capture(helper, (torch.randn(2, 2),))  # type: ignore[arg-type]


def test_compiled_modules() -> None:
    model: Any = torch.compile(nn.Linear(2, 2), backend="eager")
    with pytest.raises(CaptureError, match=r"was compiled with torch\.compile already"):
        capture(model, (torch.randn(2, 2),))


def test_scripted_modules() -> None:
    with pytest.warns((DeprecationWarning, FutureWarning), match=r"torch\.jit\.script"):
        model = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(CaptureError, match="TorchScript"):
        capture(model, (torch.randn(2, 2),))


@pytest.mark.parametrize("name", ["code", "graph", "meta"])
def test_names_that_torch_keeps_for_itself(name: str) -> None:
    model = module(lambda self, x: getattr(self, name)(x), **{name: nn.Linear(2, 2)})
    with pytest.raises(CaptureError, match=f"attribute '{name}' has a name"):
        capture(model, (torch.randn(2, 2),))
    # What the message says to do helps.
    capture(module(lambda self, x: self.inner(x), inner=model), (torch.randn(2, 2),))


# Without annotations in torch.
eager_mode: Any = torch.ao.quantization


class Converted(nn.Module):
    """A convolution that eager-mode quantization prepares, or converts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)
        self.qconfig = eager_mode.get_default_qconfig("x86")

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize(
    ("convert", "text", "fix"),
    [
        (False, "prepared for quantization and not converted", "call convert_pt2e"),
        (True, r"layer is a quantized module of eager mode", "PT2E or torchao"),
    ],
)
def test_quantization_that_is_not_finished_or_cannot_be_traced(
    convert: bool, text: str, fix: str
) -> None:
    x = torch.randn(1, 3, 8, 8)
    model = eager_mode.prepare(Converted().eval())
    model(x)
    model = eager_mode.convert(model) if convert else model
    with pytest.raises(CaptureError, match=text) as error:
        capture(model, (x,))
    assert fix in str(error.value.fix)
