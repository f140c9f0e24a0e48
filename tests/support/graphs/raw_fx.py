"""Graphs as people have them, and what must hold of one after a pass."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from qfuse.ir.errors import QfuseError
from qfuse.ir.graph.stage_graph import op_name
from qfuse.normalize.aten.activations.written_out import SpellActivation
from qfuse.normalize.builtin import BUILTIN
from qfuse.normalize.importers.dialect import Dialect, rules_of
from qfuse.passes.raw import take
from qfuse.passes.refuse import check_graph
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.driver import apply_rules
from qfuse.testing.fixed_order import run_fixed_order

K = 8


class Siblings(nn.Module):
    """Three linears of one value, beside something that they leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(K, 6), nn.Linear(K, 4, bias=False)
        self.v = nn.Linear(K, 2)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        """Return a tree."""
        h = torch.sigmoid(x.view(-1, K))
        rest = (h.t() @ h).view(-1)
        return {"qk": (torch.relu(self.q(h)), self.k(h)), "v": self.v(h).view(-1), "rest": rest}


def exported(model: nn.Module, *inputs: torch.Tensor, **options: Any) -> GraphModule:
    """Return what torch.export makes, in functional ATen."""
    program = torch.export.export(model.eval(), inputs, **options)
    module: GraphModule = program.run_decompositions().module()
    return module


def ops_of(module: GraphModule) -> Counter[str]:
    """Count what a graph calls."""
    calls = (node for node in module.graph.nodes if node.op == "call_function")
    return Counter(op_name(node) for node in calls)


def bits_of(
    module: GraphModule, inputs: Sequence[torch.Tensor], *dialects: Dialect
) -> list[torch.Tensor]:
    """Return the outputs, with linears whose sums are in an order that depends on K only.

    The graph is spelled canonically first, which is exact, so that linears of all kinds are one.
    """
    program = take(check_graph(module)).program
    # Torch's activations round in other places than arithmetic.
    rules = [r for r in rules_of((*BUILTIN, *dialects)) if not isinstance(r, SpellActivation)]
    apply_rules(program, rules, RewriteContext("normalize"))
    leaves: list[torch.Tensor] = pytree.tree_leaves(run_fixed_order(program, inputs, dense=True))
    return leaves


def assert_same_bits(
    before: Sequence[torch.Tensor], after: Sequence[torch.Tensor], *, strides: bool = True
) -> None:
    """Check that two lists of outputs are the same."""
    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        assert (old.dtype, old.shape) == (new.dtype, new.shape)
        assert torch.equal(old, new)
        assert not strides or old.stride() == new.stride()


def own_memory(outputs: Any) -> None:
    """Check that no two outputs share memory."""
    places = [t.untyped_storage().data_ptr() for t in pytree.tree_leaves(outputs)]
    assert len(set(places)) == len(places)


def check_values(module: GraphModule, *inputs: torch.Tensor) -> None:
    """Check that every fake value is like the real one, down to its strides."""
    with torch.no_grad():
        _Compare(module).run(*inputs)


class _Compare(Interpreter):
    def run_node(self, n: Node) -> Any:
        made = super().run_node(n)
        if made is not None and n.op != "output" and op_name(n) != "aten.copy_":
            noted = pytree.tree_leaves(n.meta["val"])
            for fake, real in zip(noted, pytree.tree_leaves(made), strict=True):
                if isinstance(real, torch.Tensor):
                    assert (fake.dtype, fake.device) == (real.dtype, real.device), n
                    assert _known(fake.shape, real.shape) == tuple(real.shape), n
                    assert _known(fake.stride(), real.stride()) == tuple(real.stride()), n
        return made


def _known(fake: Sequence[Any], real: Sequence[int]) -> tuple[int, ...]:
    """Put in the real sizes where the fake ones vary."""
    return tuple(f if isinstance(f, int) else r for f, r in zip(fake, real, strict=True))


def untouched(module: GraphModule, call: Callable[[], object]) -> QfuseError:
    """Check that a call raises, and that the module is what it was; return the error."""
    graph, text = module.graph, str(module.graph)
    state = {name: id(value) for name, value in _state(module)}
    metas = [dict(node.meta) for node in graph.nodes]
    try:
        call()
    except QfuseError as error:
        assert module.graph is graph
        assert str(module.graph) == text
        assert {name: id(value) for name, value in _state(module)} == state
        assert all(_same_meta(m, n) for m, n in zip(metas, module.graph.nodes, strict=True))
        return error
    raise AssertionError("it did not raise")


def _same_meta(meta: dict[str, Any], node: Node) -> bool:
    return meta.keys() == node.meta.keys() and all(node.meta[k] is v for k, v in meta.items())


def _state(module: GraphModule) -> Any:
    named = module.named_buffers(remove_duplicate=False)
    return itertools.chain(module.named_parameters(remove_duplicate=False), named)
