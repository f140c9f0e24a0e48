"""What `check_backend` finds in a backend that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch.fx import Node

from qfuse.backends import Backend
from qfuse.ir.events import Exactness
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import as_quantize
from qfuse.ir.refusal import Refusal
from qfuse.testing import battery, check_backend
from qfuse.testing.cases import BackendCase

CASES = [case for case in battery() if case.name.startswith("quantize: ")]


class Right(Backend):
    """Claims quantizes to int8, and computes them by the reference."""

    name = "right"
    supported_ops = (ops.quantize,)
    exactness: Exactness = Exactness.EXACT  # type: ignore[misc]

    def is_legal(self, node: Node) -> Literal[True] | Refusal:
        """Claim int8."""
        view = as_quantize(node)
        assert view is not None
        return True if view.params.spec.dtype is torch.int8 else Refusal("it is not int8")

    def implement(self, node: Node) -> Callable[..., Any]:
        """Return the op."""
        del node
        return self.compute

    def compute(self, *args: Any) -> torch.Tensor:
        """Quantize."""
        result: torch.Tensor = ops.quantize(*args)
        return result


class OffByOne(Right):
    """Is one step off at one element."""

    def compute(self, *args: Any) -> torch.Tensor:
        result = super().compute(*args)
        result[0, 0] += 1 if result[0, 0] < 0 else -1
        return result


class OffByTwo(Right):
    """Is two steps off."""

    def compute(self, *args: Any) -> torch.Tensor:
        result = super().compute(*args)
        result[1, 2] += 2 if result[1, 2] < 0 else -2
        return result


class Second(Right):
    """Is right once."""

    def __init__(self) -> None:
        self.calls = 0

    def compute(self, *args: Any) -> torch.Tensor:
        self.calls += 1
        result = super().compute(*args)
        return result if self.calls % 2 else -result


class Writes(Right):
    """Writes its input."""

    def compute(self, *args: Any) -> torch.Tensor:
        result = super().compute(*args)
        args[0][0, 0] = 7
        return result


class Reuses(Right):
    """Returns one buffer for all calls."""

    def __init__(self) -> None:
        self.buffers: dict[Any, torch.Tensor] = {}

    def compute(self, *args: Any) -> torch.Tensor:
        result = super().compute(*args)
        key = (result.shape, result.dtype, result.stride())
        return self.buffers.setdefault(key, result).copy_(result)


class Cuts(Right):
    """Returns a part."""

    def compute(self, *args: Any) -> torch.Tensor:
        return super().compute(*args)[:1]


class Wraps(Right):
    """Returns a tuple."""

    def compute(self, *args: Any) -> Any:
        return (super().compute(*args),)


class Raises(Right):
    """Does not implement its claims."""

    def implement(self, node: Node) -> Callable[..., Any]:
        found: Callable[..., Any] = node.meta["no such key"]
        return found


class Forgets(Right):
    """Returns no function."""

    def implement(self, node: Node) -> Any:
        del node


class Turns(Right):
    """Returns other strides."""

    def compute(self, *args: Any) -> torch.Tensor:
        return super().compute(*args).t().contiguous().t()


class Silent(Right):
    """Refuses without a reason."""

    def is_legal(self, node: Node) -> Literal[True] | Refusal:
        del node
        return Refusal("")


class Moody(Right):
    """Changes its mind."""

    def __init__(self) -> None:
        self.asked = 0

    def is_legal(self, node: Node) -> Literal[True] | Refusal:
        del node
        self.asked += 1
        return True if self.asked % 2 else Refusal("not now")


class Passes(Right):
    """Claims a relu, and returns its input."""

    supported_ops = (torch.ops.aten.relu.default,)

    def is_legal(self, node: Node) -> Literal[True] | Refusal:
        del node
        return True

    def compute(self, *args: Any) -> torch.Tensor:
        x: torch.Tensor = args[0]
        return x.clamp(min=0) if bool((x < 0).any()) else x


class Nothing(Right):
    """Claims nothing."""

    def is_legal(self, node: Node) -> Literal[True] | Refusal:
        del node
        return Refusal("never")


def lossy(kind: type[Right]) -> Backend:
    backend = kind()
    backend.exactness = Exactness.LOSSY
    return backend


def test_a_right_backend_passes() -> None:
    coverage = check_backend(Right(), CASES)

    assert coverage.claimed == {"qfuse.quantize": 5}
    text = str(coverage)
    assert "quantize: int8 per-tensor: claims qfuse.quantize" in text
    assert "quantize: uint8 per-tensor: qfuse.quantize: it is not int8" in text


@pytest.mark.parametrize(
    ("backend", "complaint"),
    [
        (OffByOne(), "differ in bits"),
        (OffByTwo(), "differ in bits"),
        (lossy(OffByTwo), "off by up to 2 steps, allowed are 1; first at (1, 2)"),
        (Second(), "the second call"),
        (Writes(), "it writes its inputs"),
        (Turns(), "its result has the strides (1, 6), the op's has (16, 1)"),
        (Silent(), "without a reason"),
        (Moody(), "answers differently"),
        (Reuses(), "the second call with the sizes {}: its result shares memory with that of an"),
        (Cuts(), "the type changed"),
        (Wraps(), "computed 1 values for qfuse.quantize.default"),
        (Raises(), "implement of the backend 'right' failed for qfuse.quantize.default: KeyError"),
        (Forgets(), "implement of the backend 'right' returned None for qfuse.quantize.default"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Backend) else None,
)
def test_a_wrong_backend_is_found(backend: Backend, complaint: str) -> None:
    with pytest.raises(AssertionError) as caught:
        check_backend(backend, CASES)
    text = str(caught.value)
    assert complaint in text
    assert "the backend 'right' fails" in text
    assert "- quantize: int8 per-tensor: " in text
    assert "qfuse.quantize" in text


def test_a_result_in_the_memory_of_an_input_is_found() -> None:
    def build(b: Any) -> Node:
        made: Node = b.call(torch.ops.aten.relu.default, b.arg("x", torch.int8, 3, 4))
        return made

    with pytest.raises(AssertionError, match="shares memory with an input; return a new tensor"):
        check_backend(Passes(), [BackendCase("relu", build)])


def test_one_step_is_allowed_to_a_lossy_backend() -> None:
    assert check_backend(lossy(OffByOne), CASES).claimed["qfuse.quantize"] == 5


def test_a_backend_that_claims_nothing_is_found() -> None:
    with pytest.raises(AssertionError, match="claims nothing") as caught:
        check_backend(Nothing(), CASES)
    assert "never" in str(caught.value)


def test_cases_may_be_added() -> None:
    def build(b: Any) -> Node:
        x = b.arg("x", torch.float32, "n", 4)
        made: Node = b.call(ops.quantize, x, b.const("s", torch.ones(1, 1)), None, TEXT)
        return made

    case = BackendCase("mine", build, ({"n": 1}, {"n": 3}))
    assert check_backend(Right(), [case]).claimed == {"qfuse.quantize": 1}


TEXT = "int8[-128,127] *x* float32 float32:reciprocal:round-zp int"


class Products(Backend):
    """Claims fused products, and computes them by their references."""

    name = "products"
    supported_ops = (
        torch.ops.qfuse.linear.default,
        torch.ops.qfuse.convolution.default,
        torch.ops.qfuse.matmul.default,
    )
    exactness: Exactness = Exactness.EXACT  # type: ignore[misc]

    def is_legal(self, node: Node) -> Literal[True] | Refusal:
        """Claim every one."""
        del node
        return True

    def implement(self, node: Node) -> Callable[..., Any]:
        """Return the op."""
        assert isinstance(node.target, torch._ops.OpOverload)
        return node.target


def test_the_battery_has_every_kind_of_product() -> None:
    named = ("int8 per-tensor x int8 per-tensor -> float32", "1x1: torch.int8 per-tensor")
    cases = [c for c in battery() if any(part in c.name for part in named)]
    claimed = check_backend(Products(), cases).claimed
    assert claimed.keys() == {"qfuse.linear", "qfuse.convolution", "qfuse.matmul"}
