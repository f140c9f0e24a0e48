"""An error of ours costs a merge, and never the model of somebody who uses ``torch.compile``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.frozen_inductor import freeze
from torch import nn

from qfuse.ir.errors import RewriteError
from qfuse.ir.events import MissCode, Noted
from qfuse.report import Report

hooks: Any = importlib.import_module("qfuse.inductor.hooks")
merge: Any = importlib.import_module("qfuse.inductor.merge")
aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default)


class Pairs(nn.Module):
    """Two groups of siblings."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 8), nn.Linear(16, 4)
        self.c, self.d = nn.Linear(12, 8), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        both = torch.cat([self.a(x).relu(), self.b(x).sigmoid()], -1)
        return self.c(both).relu(), self.d(both).sigmoid()


def raises(real: Callable[..., Any], error: Exception, *, on: int) -> Callable[..., Any]:
    """Stand in for ``real``, and fail when it is called the ``on``-th time, with half of it done."""
    calls = []

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        found = real(*args, **kwargs)
        if len(calls) == on:
            raise error
        return found

    return stand_in


def warned(report: Report) -> list[str]:
    return [note.text for note in report.notes if note.warn]


def targets(found: Any) -> list[str]:
    return [str(n.target) for g in found.graphs for n in g.graph.nodes]


ERRORS = [RuntimeError("injected"), KeyError("injected"), RewriteError("injected")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(
    ("where", "name", "on"),
    [
        (hooks, "merge_products", 1),
        (merge, "plan_epilogue", 2),
        (hooks.inductor, "frozen_inputs", 1),
    ],
    ids=["behind-all", "half-way", "in-front"],
)
def test_a_failure_leaves_the_graph_as_it_was(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, on: int, error: Exception
) -> None:
    x = torch.randn(3, 16)
    model = Pairs().eval()
    monkeypatch.setattr(where, name, raises(getattr(where, name), error, on=on))
    found = freeze(model, x)
    assert not found.report.fired
    assert found.calls(*PRODUCTS) == 4
    assert found.calls(aten.split_with_sizes.default) == 0
    (text,) = warned(found.report)
    assert "left the graph unchanged" in text
    assert "injected" in text
    for plain, merged in zip(found.plain, found.merged, strict=True):
        assert torch.equal(plain, merged)


def test_a_group_that_an_op_rejects_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, calls = merge.rebuild, []

    def rejects(product: Any, x: Any, columns: Any, bias: Any, rw: Any) -> Any:
        calls.append(product)
        if len(calls) > 1:
            return real(product, x, columns, bias, rw)
        return rw.call(aten.mm.default, x, x)

    monkeypatch.setattr(merge, "rebuild", rejects)
    found = freeze(Pairs().eval(), torch.randn(3, 16))
    assert found.report.fired == {"merge-linears": 1}
    assert found.calls(*PRODUCTS) == 3
    (miss,) = found.report.closest_misses
    assert miss.code is MissCode.BANNED
    assert "rolled back" in miss.reason
    assert "its op rejects" in miss.reason
    assert any("please report it" in text for text in warned(found.report))
    for plain, merged in zip(found.plain, found.merged, strict=True):
        torch.testing.assert_close(plain, merged)


def test_a_failure_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    record = hooks.GraphRecord({}, [Noted("inductor", "said", warn=True), Noted("inductor", "not")])
    with pytest.warns(UserWarning, match="said") as seen:
        hooks._warn(record)
    assert len(seen) == 1
    error = NotADirectoryError("not ours")
    monkeypatch.setattr(hooks, "merge_products", raises(hooks.merge_products, error, on=1))
    with pytest.raises(Exception, match="not ours"):
        freeze(Pairs().eval(), torch.randn(3, 16))


def test_what_is_not_merged_are_the_same_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = hooks.apply_to, []

    def watched(module: Any, twin: Any, twins: Any) -> None:
        graph, before = module.graph, {node: node.name for node in module.graph.nodes}
        real(module, twin, twins)
        assert module.graph is graph
        graph.lint()
        seen.append([node for node, name in before.items() if node in set(graph.nodes)])
        assert all(before[node] == node.name for node in seen[-1])

    monkeypatch.setattr(hooks, "apply_to", watched)
    found = freeze(Pairs().eval(), torch.randn(3, 16))
    assert found.report.fired == {"merge-linears": 2}
    (kept,) = seen
    names = [node.target for node in kept if node.op == "call_function"]
    assert names.count(aten.relu.default) == 2
    assert names.count(aten.sigmoid.default) == 2
