"""Graphs that a pass cannot read: refused by name, and untouched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.graphs.raw_fx import K, Siblings, exported, untouched
from torch import nn
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from qfuse.ir.errors import GraphError, OptionsError
from qfuse.normalize.importers.dialect import Dialect
from qfuse.passes import (
    CancelQuantize,
    FuseConvolutions,
    FuseLinears,
    FuseMatmuls,
    FuseResults,
    LiftCombineQuantize,
    MergeLinears,
    SinkDequantize,
)
from qfuse.rewrite.rewriter import GraphEditor

aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
PASSES = (
    CancelQuantize,
    FuseConvolutions,
    FuseLinears,
    FuseMatmuls,
    FuseResults,
    LiftCombineQuantize,
    MergeLinears,
    SinkDequantize,
)


class InPlace(nn.Module):
    """Writes to what the caller gave."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Relu."""
        return x.relu_()


def in_place() -> GraphModule:
    return torch.export.export(InPlace(), (torch.randn(3),)).module()


def writes_before_it_reads() -> GraphModule:
    return _traced(lambda x, y: x.copy_(y).sum())


def reads_after_it_wrote() -> GraphModule:
    def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.copy_(y)
        return x.view(-1) + 1

    return _traced(call)


def _traced(call: Callable[..., Any]) -> GraphModule:
    return make_fx(call)(torch.randn(3), torch.randn(3))


def of_modules() -> GraphModule:
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))


def of_methods() -> GraphModule:
    return torch.fx.symbolic_trace(lambda x: x.view(-1))


def of_functions() -> GraphModule:
    return torch.fx.symbolic_trace(lambda x, y: torch.nn.functional.linear(x, y, None))


def of_packets() -> GraphModule:
    return torch.fx.symbolic_trace(lambda x: (torch.ops.aten.relu(x),))


class Deciding(nn.Module):
    """Decides at run time."""

    def forward(self, x: torch.Tensor) -> Any:
        """Decide."""
        return torch.cond(x.sum() > 0, lambda v: v + 1, lambda v: v - 1, (x,))


def nested() -> GraphModule:
    return torch.export.export(Deciding(), (torch.randn(3),)).module()


def without_an_attribute() -> GraphModule:
    graph = Graph()
    graph.output(graph.get_attr("gone"))
    root = nn.Module()
    root.register_buffer("gone", torch.zeros(3))
    module = GraphModule(root, graph)
    del module.gone
    return module


def without_values() -> GraphModule:
    module = make_fx(torch.relu)(torch.randn(3))
    for node in module.graph.nodes:
        node.meta.pop("val", None)
    return module


def of_other_things() -> GraphModule:
    ones = torch.ones(3)
    module = make_fx(lambda x: x + ones)(torch.randn(3))
    (name,) = (str(node.target) for node in module.graph.find_nodes(op="get_attr"))
    delattr(module, name)
    setattr(module, name, 3)
    return module


REFUSED = [
    (
        in_place,
        r"aten\.relu_\.default writes .* in .*test_refuse.py:\d+: return .*relu_.*run_decomp",
    ),
    (writes_before_it_reads, r"the result of copy_ is used.*%copy_"),
    (reads_after_it_wrote, r"the result of copy_ is used|comes after %copy_"),
    (of_modules, r"calls a module \(Linear\).*call_module 0.*make_fx"),
    (of_methods, r"calls a method \(view\)"),
    (of_functions, r"calls linear, which is not an op of torch.ops"),
    (of_packets, r"aten\.relu, which is not an overload"),
    (nested, r"contains a subgraph"),
    (without_an_attribute, r"no attribute gone"),
    (without_values, r"has no meta.*example inputs"),
    (of_other_things, r"uses an int, not a tensor"),
]


@pytest.mark.parametrize(("make", "text"), REFUSED, ids=[make.__name__ for make, _ in REFUSED])
@pytest.mark.parametrize("kind", PASSES)
@torch.no_grad()
def test_refuses(make: Callable[[], GraphModule], text: str, kind: type[MergeLinears]) -> None:
    module = make()
    error = untouched(module, lambda: kind()(module))

    assert isinstance(error, GraphError)
    with pytest.raises(GraphError, match=f"(?s){text}"):
        raise error


def test_refuses_what_is_no_graph() -> None:
    program = torch.export.export(Siblings().eval(), (torch.randn(3, K),))

    with pytest.raises(GraphError, match=r"program\.module\(\)"):
        MergeLinears()(program)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="a Siblings, not"):
        MergeLinears()(Siblings())  # type: ignore[arg-type]


def test_refuses_other_than_one_example_per_input() -> None:
    module = without_values()

    assert "2 example inputs" in str(untouched(module, lambda: MergeLinears()(module, [1, 2])))


def strip(module: GraphModule) -> GraphModule:
    for node in module.graph.nodes:
        node.meta.pop("val", None)
    return module


@pytest.mark.parametrize("stripped", [False, True])
@pytest.mark.parametrize(
    ("examples", "text"),
    [
        ({"y": torch.ones(3)}, r"given for \['y'\].*placeholders are \['arg0_1'\].*by their names"),
        (torch.ones(1), "the example inputs are a Tensor"),
        ("a", "the example inputs are a str"),
        (["a"], "its example input is a str"),
        ([torch.ones(3), 1], "2 example inputs"),
    ],
)
def test_refuses_example_inputs_that_are_none(examples: Any, text: str, stripped: bool) -> None:
    module = make_fx(torch.relu)(torch.randn(3))
    module = strip(module) if stripped else module
    error = untouched(module, lambda: MergeLinears()(module, examples))

    with pytest.raises(GraphError, match=f"(?s){text}"):
        raise error


@pytest.mark.parametrize(
    "example", [torch.ones(4), torch.ones(1, 3), torch.ones(3, dtype=torch.float64), 3]
)
def test_refuses_example_inputs_that_contradict_the_graph(example: Any) -> None:
    module = make_fx(torch.relu)(torch.randn(3))
    error = untouched(module, lambda: MergeLinears()(module, [example]))

    assert "expected float32[3]" in str(error)
    assert not MergeLinears()(module, [torch.ones(3)]).modified


def test_example_inputs_may_be_given_by_name() -> None:
    module = strip(make_fx(lambda x, y: x @ y)(torch.randn(3, 4), torch.randn(4, 2)))
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    given = dict(zip(names, (torch.randn(3, 4), torch.randn(4, 2)), strict=True))

    assert not MergeLinears()(module, dict(reversed(given.items()))).modified


def test_refuses_example_inputs_that_do_not_run() -> None:
    module = make_fx(lambda x, y: x @ y)(torch.randn(3, 4), torch.randn(4, 2))
    for node in module.graph.nodes:
        node.meta.pop("val", None)
    wrong = [torch.randn(3, 4), torch.randn(3, 2)]

    error = str(untouched(module, lambda: MergeLinears()(module, wrong)))
    assert "%mm" in error
    assert "shapes and dtypes that the graph was traced with" in error


def test_an_error_in_the_middle_leaves_the_module_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = exported(Siblings(), torch.randn(3, K))

    def fail(_: object) -> None:
        raise GraphError("out of ideas")

    with monkeypatch.context() as patch:
        patch.setattr(Graph, "lint", fail)
        untouched(module, lambda: MergeLinears()(module))
    # Late: the graph has been replaced by then.
    lint, calls = Graph.lint, []

    def fail_last(graph: Graph) -> None:
        calls.append(graph)
        if graph.owning_module is module:
            fail(graph)
        lint(graph)

    with monkeypatch.context() as patch:
        patch.setattr(Graph, "lint", fail_last)
        untouched(module, lambda: MergeLinears()(module))
    assert len(calls) > 1
    assert MergeLinears()(module).modified


def test_an_error_of_a_rule_leaves_the_module_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    module = exported(Siblings(), torch.randn(3, K))
    graph = module.graph

    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(GraphEditor, "add_constant", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        MergeLinears()(module)
    assert module.graph is graph


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"equality": "close"}, "equality='close' is not one of 'exact', 'assumed'"),
        ({"spelling": "loud"}, "spelling='loud'"),
        ({"cost": 3}, "cost must be a CostModel"),
        ({"dialects": [3]}, "dialects holds an int"),
    ],
)
def test_refuses_options_that_there_are_not(options: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionsError, match=text):
        MergeLinears(**options)


def test_a_dialect_may_be_given() -> None:
    module = exported(Siblings(), torch.randn(3, K))

    # Without the dialect that knows addmm there are no linears.
    assert not MergeLinears(dialects=[Dialect("none", list)])(module).modified
