"""What every captured graph must be, and small models that several tests capture."""

from __future__ import annotations

import copy
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from qfuse.capture import capture
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.ir.signature.run import run_functional
from qfuse.ir.stages.verify import verify


class Block(nn.Module):
    """A residual pair of linears."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.up(x))
        y: torch.Tensor = x + self.down(h)
        return y


class Stack(nn.Module):
    """Two blocks."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width), Block(width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def module(forward: FunctionType | Any, **state: Any) -> Any:
    """A module in eval mode with the given ``forward(self, ...)``.

    Modules and parameters are registered as such, tensors named ``b_*`` as buffers, anything else
    is a plain attribute.
    """
    # torch.export notes the lines of functions that are called so, and of no others.
    forward.__code__ = forward.__code__.replace(co_name="forward")
    made = type("Made", (nn.Module,), {"forward": forward})()
    for name, value in state.items():
        if name.startswith("b_"):
            made.register_buffer(name, value)
        else:
            setattr(made, name, value)
    return made.eval()


def check_graph(program: CapturedGraph) -> None:
    """Assert what holds for every captured graph."""
    verify(program)
    modes = set()
    for node in program.graph.nodes:
        assert node.op in {"placeholder", "get_attr", "call_function", "output"}, node.op
        assert set(node.meta) <= {"val", "qfuse_source", "qfuse_module", "qfuse_mutable"}
        if isinstance(value := node.meta.get("val"), torch.Tensor):
            modes.add(id(value.fake_mode))  # type: ignore[attr-defined]
            assert not value.requires_grad, node
        if node.op == "call_function":
            assert node.meta["qfuse_source"].count(":") >= 2, node
    assert len(modes) <= 1, "the fake tensors are of several modes"
    assert not list(program.module.parameters())
    assert not any(b.requires_grad for b in program.module.buffers())
    placeholders = [n.target for n in program.graph.nodes if n.op == "placeholder"]
    assert placeholders == [i.placeholder for i in program.signature.inputs if i.placeholder]


def captured(model: Any, *args: Any, dynamic_shapes: Any = None, **kwargs: Any) -> CapturedGraph:
    """Capture a model and check the graph."""
    program = capture(model, args, kwargs, dynamic_shapes=dynamic_shapes)
    check_graph(program)
    return program


def assert_same(got: Any, want: Any) -> None:
    """Assert equal structure, and equal bits in every leaf."""
    got_leaves, got_spec = pytree.tree_flatten(got)
    want_leaves, want_spec = pytree.tree_flatten(want)
    assert got_spec == want_spec
    for a, b in zip(got_leaves, want_leaves, strict=True):
        assert type(a) is type(b) or isinstance(a, torch.Tensor) is isinstance(b, torch.Tensor)
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            assert torch.equal(a, b), (a - b).abs().max()
        else:
            assert a == b


def assert_same_run(program: CapturedGraph, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run graph and model on equal arguments, assert equal results and return the graph's.

    The arguments are compared afterwards as well, since a model may write them.
    """
    mine, theirs = copy.deepcopy((args, kwargs)), (args, kwargs)
    _, result = run_functional(program, *mine[0], **mine[1])
    with torch.no_grad():
        want = model(*theirs[0], **theirs[1])
    assert_same(result, want)
    assert_same(mine, theirs)
    return result
