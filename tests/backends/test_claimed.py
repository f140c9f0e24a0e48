"""Running graphs whose nodes backends claimed: op by op, with state, by several backends."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import nn
from torch.fx import Node

import qfuse
from qfuse.backends import Backend, Runner
from qfuse.ir.errors import BackendError
from qfuse.ir.events import Checked, Exactness
from qfuse.ir.graph.stage_graph import LoweredGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.refusal import Refusal
from qfuse.report.facts import ClaimFacts
from qfuse.rewrite.prelude import OpOverload, aten
from qfuse.targets import Target
from qfuse.zoo import recipes


class Counting(Backend):
    """Claims all of its ops, runs their references, and counts the calls."""

    name: ClassVar[str] = "counting"
    supported_ops: ClassVar[tuple[OpOverload, ...]] = (ops.linear,)

    def __init__(self) -> None:
        self.calls = 0

    def is_legal(self, node: Node) -> Literal[True] | Refusal:
        """Claim everything."""
        del node
        return True

    def implement(self, node: Node) -> Callable[..., Any]:
        """Return a callable that is no function."""
        return partial(self.compute, node.target)

    def compute(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the reference."""
        self.calls += 1
        return op(*args, **kwargs)


class Sigmoids(Counting):
    """Claims sigmoids."""

    name = "sigmoids"
    supported_ops = (aten.sigmoid.default,)


class State(nn.Module):
    """A quantized linear, a sigmoid, and a buffer that every call writes."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)
        self.register_buffer("steps", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.sigmoid(self.linear(x).flip(-1))
        self.steps += y.sum(0)
        return y * 2


def quantized() -> nn.Module:
    return recipes.quantize(State().eval(), "w8a16", (torch.randn(3, 16),)).model


def compiled(model: nn.Module, backend: Any, **more: Any) -> Any:
    x = torch.randn(3, 16)
    options = {"backend": backend, "own_kernels": False}
    return qfuse.compile(model, (x,), target=Target.for_testing(), options=options, **more)


@pytest.mark.numeric
def test_state_is_written_and_copies_have_their_own() -> None:
    model, x = quantized(), torch.randn(3, 16)
    backend = Counting()
    fast = compiled(copy.deepcopy(model), backend)
    other = copy.deepcopy(fast)
    backend.calls = 0
    expected = model(x)

    assert fast.backend == "counting"
    assert torch.allclose(fast(x), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(fast(x), other(x))
    assert backend.calls == 3
    assert set(fast.report.claims.values()) == {"counting"}
    assert fast.report.facts.claims == (ClaimFacts("counting", 1),)


def test_several_backends_share_a_graph() -> None:
    backends = Counting(), Sigmoids()
    fast = compiled(quantized(), backends)
    for backend in backends:
        backend.calls = 0
    fast(torch.randn(3, 16))

    assert fast.backend == "counting, sigmoids"
    assert [backend.calls for backend in backends] == [1, 1]
    assert set(fast.report.claims.values()) == {"counting", "sigmoids"}


def test_dynamic_sizes() -> None:
    batch = torch.export.Dim("batch", max=64)
    fast = compiled(quantized(), Counting(), dynamic_shapes=({0: batch},))

    assert fast(torch.randn(1, 16)).shape == (1, 8)
    assert fast(torch.randn(64, 16)).shape == (64, 8)


class Wrong(Counting):
    """Returns other values."""

    name = "wrong"

    def compute(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute(op, *args, **kwargs) + 1


@pytest.mark.numeric
def test_wrong_values_are_found_and_the_references_run_instead() -> None:
    model, x = quantized(), torch.randn(3, 16)
    fast = compiled(copy.deepcopy(model), Wrong())

    assert fast.backend == "eager"
    assert "the code of the wrong backend fails its check" in fast.report.notes[-1].text
    assert fast.report.kernels == {"expand": 1}
    assert fast.report.fused == ()
    assert fast.report.expanded[0].losers == (("wrong", "its code fails the check"),)
    assert fast.report.facts.rows()["claimed by wrong"] == "1 node, not used: the references run"
    assert torch.allclose(fast(x), model(x), rtol=1e-5, atol=1e-6)


class Lossy(Wrong):
    """Says so."""

    name = "lossy"
    exactness: ClassVar[Exactness] = Exactness.LOSSY


def test_a_lossy_backend_is_not_compared_and_the_report_says_so() -> None:
    fast = compiled(quantized(), Lossy())
    (check,) = [c for c in fast.report.checks if c.what == "compiled"]

    assert fast.backend == "lossy"
    assert fast.report.facts.rows()["claimed by lossy"] == "1 node, lossy"
    assert check == Checked("check", "compiled", True, Exactness.LOSSY, 0.0, 0.0)


class Fails(Counting):
    """Raises when it runs."""

    name = "fails"

    def compute(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(f"out of tiles for {op}: {len(args)}, {len(kwargs)}")


def test_a_backend_that_fails_is_an_error_that_names_it() -> None:
    with pytest.raises(BackendError, match="the backend fails fails on the example inputs") as told:
        compiled(quantized(), Fails())
    assert "out of tiles" in str(told.value)


class Unable(Counting):
    """Does not implement what it claims."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.made = made

    def implement(self, node: Node) -> Any:
        return self.made(node)


@pytest.mark.parametrize("check", ["site", "off"])
@pytest.mark.parametrize(
    ("made", "complaint"),
    [
        (lambda node: node.meta["no such key"], "failed for qfuse.linear.default: KeyError"),
        (lambda node: None, "returned None for qfuse.linear.default"),  # noqa: ARG005
    ],
)
def test_a_node_that_is_claimed_and_not_implemented_is_named(
    made: Any, complaint: str, check: Any
) -> None:
    with pytest.raises(BackendError, match=f"implement of the backend 'counting' {complaint}"):
        compiled(quantized(), Unable(made), check=check)


@pytest.mark.parametrize(
    ("result", "complaint"),
    [(3, "a number"), ("x", "an object of the type str"), ((1, 2), "2 values")],
)
def test_a_result_that_is_no_tensor_is_named(result: Any, complaint: str) -> None:
    backend = Unable(lambda node: lambda *args: result)  # noqa: ARG005
    text = f"the backend 'counting' computed {complaint} for qfuse.linear.default, .* a tensor"
    with pytest.raises(BackendError, match=text):
        compiled(quantized(), backend)


class Whole(Counting):
    """Compiles whole graphs."""

    name = "whole"

    def compile(self, lowered: LoweredGraph) -> Runner:
        """Refuse."""
        raise BackendError(f"a graph of {len(lowered.graph.nodes)} nodes is too large")


def test_compile_is_asked_for_whole_graphs() -> None:
    with pytest.raises(BackendError, match="is too large"):
        compiled(quantized(), Whole())


def test_explain_shows_claims_without_compiling() -> None:
    options = {"backend": Whole(), "own_kernels": False}
    report = qfuse.explain(quantized(), (torch.randn(3, 16),), options=options)

    assert report.kernels == {"whole": 1}
