"""What a rewritten copy has become is taken over in place, and what was not rewritten stays."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from qfuse.passes._torch_api import new_mode
from qfuse.rewrite.rewriter import GraphEditor
from qfuse.rewrite.transaction import apply_to, working_copy

aten = torch.ops.aten


def module() -> GraphModule:
    """``relu(x + shift)`` and the sigmoid of that; the name ``shift_1`` is somebody else's."""
    root = nn.Module()
    root.register_buffer("shift", torch.ones(4))
    graph, mode = torch.fx.Graph(), new_mode()
    x, shift = graph.placeholder("x"), graph.get_attr("shift")
    added = graph.call_function(aten.add.Tensor, (x, shift))
    relu = graph.call_function(aten.relu.default, (added,))
    sigmoid = graph.call_function(aten.sigmoid.default, (relu,))
    gives: Any = (relu, [sigmoid, {"x": x, "one": 1}])
    graph.output(gives)
    with mode:
        for node in (x, shift, added, relu, sigmoid):
            node.meta["val"] = torch.empty(4)
    made = GraphModule(root, graph)
    made.register_buffer("shift_1", torch.full((4,), 7.0))
    return made


def rewritten(twin: GraphModule) -> None:
    """Subtract another constant instead."""
    (add,) = twin.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    rw = GraphEditor(twin).rewriter("test", add)
    x = add.args[0]
    assert isinstance(x, torch.fx.Node)
    negated = rw.call(aten.neg.default, x)
    rw.replace(add, rw.call(aten.sub.Tensor, negated, rw.constant(torch.full((4,), 2.0), "shift")))
    rw.commit()


def results(m: GraphModule, x: torch.Tensor) -> list[torch.Tensor]:
    m.recompile()
    relu, (sigmoid, _) = m(x)
    return [relu, sigmoid]


def test_the_copy_is_rewritten_and_the_module_is_not() -> None:
    own, x = module(), torch.randn(4)
    before, expected = str(own.graph), results(own, x)
    twin, _ = working_copy(own)
    assert str(twin.graph) == before
    rewritten(twin)
    assert str(own.graph) == before
    assert dict(own.named_buffers()).keys() == {"shift", "shift_1"}
    for a, b in zip(expected, results(own, x), strict=True):
        assert torch.equal(a, b)


def test_the_graph_and_untouched_nodes_are_the_same_objects() -> None:
    own, x = module(), torch.randn(4)
    graph, nodes = own.graph, {n.name: n for n in own.graph.nodes}
    twin, twins = working_copy(own)
    assert list(twins) == list(nodes.values())
    rewritten(twin)
    apply_to(own, twin, twins)
    graph.lint()
    assert own.graph is graph
    kept = {name: node for name, node in nodes.items() if node in set(graph.nodes)}
    assert set(kept) == {"x", "relu_default", "sigmoid_default", "output"}
    assert all(node.name == name for name, node in kept.items())
    relu = (-x - 2).relu()
    assert torch.equal(results(own, x)[0], relu)
    assert torch.equal(results(own, x)[1], relu.sigmoid())
    assert own.get_buffer("shift_1")[0] == 7
    made: list[Any] = [n for n in graph.nodes if n not in nodes.values()]
    assert [n.meta["val"].shape for n in made] == [(4,)] * 3


def test_nothing_rewritten_changes_nothing() -> None:
    own = module()
    before = str(own.graph)
    apply_to(own, *working_copy(own))
    assert str(own.graph) == before
