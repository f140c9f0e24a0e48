"""The one place that gates, proves, commits and logs a rewrite."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from qfuse.ir.errors import RewriteError
from qfuse.ir.events import Exactness, Noted, RolledBack
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.refusal import Refusal
from qfuse.rewrite.budget import RewriteBudget
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.prelude import Rewriter, aten
from qfuse.rewrite.rewriter import Journal
from qfuse.rewrite.session import Applied, Denied, RewriteSession, Undone
from qfuse.testing.build import GraphBuilder


class RefuseAll:
    """A checker that holds nothing for right."""

    def check(self, journal: Journal, exactness: Exactness, what: str) -> str | None:
        del journal, exactness
        return f"{what} is wrong"

    def forget(self, nodes: Sequence[Node]) -> None:
        del nodes


def program() -> tuple[NormalGraph, Node]:
    """A graph of one relu, and that."""
    b = GraphBuilder()
    node = b.call(aten.relu.default, b.arg("x", torch.float32, 4))
    return b.done(b.call(aten.neg.default, node)), node


def rewrite(
    graph: NormalGraph, node: Node, context: RewriteContext
) -> Applied[Node] | Denied | Undone:
    """Replace the relu by an abs, and note that."""

    def edit(rw: Rewriter) -> Node:
        made = rw.call(aten.abs.default, node.args[0])
        rw.replace(node, made)
        return made

    def event(key: str, rw: Rewriter, made: Node) -> Noted:
        del rw
        return Noted("test", f"{key} made {made.name}")

    session = RewriteSession(graph, context)
    return session.rewrite("to-abs", node, edit, proof=Exactness.EXACT, event=event)


def test_what_is_permitted_is_committed_and_logged() -> None:
    graph, node = program()
    context = RewriteContext("test")

    done = rewrite(graph, node, context)

    assert isinstance(done, Applied)
    assert done.erased == [node]
    assert [n.text for n in graph.log.of(Noted)] == ["test/to-abs@relu_default made abs_default"]
    assert [edit.replaced for edit in context.edits] == [(("relu_default", "abs_default"),)]
    assert "aten.abs" in to_text(graph.graph)


def test_what_is_banned_is_not_tried() -> None:
    graph, node = program()
    before = to_text(graph.graph)

    done = rewrite(
        graph, node, RewriteContext("test", budget=RewriteBudget(banned=frozenset({"test/to-abs"})))
    )

    assert isinstance(done, Denied)
    assert done.banned
    assert to_text(graph.graph) == before
    assert not len(graph.log)


def test_without_fuel_nothing_is_banned() -> None:
    graph, node = program()
    done = rewrite(graph, node, RewriteContext("test", budget=RewriteBudget(fuel=0)))
    assert isinstance(done, Denied)
    assert not done.banned


def test_what_is_wrong_is_undone_and_logged() -> None:
    graph, node = program()
    before = to_text(graph.graph)
    context = RewriteContext("test", checker=RefuseAll())

    done = rewrite(graph, node, context)

    assert isinstance(done, Undone)
    assert isinstance(done, Refusal)
    assert done.wrong == "test/to-abs@relu_default is wrong"
    assert to_text(graph.graph) == before
    assert [e.rule for e in graph.log.of(RolledBack)] == ["to-abs"]
    assert not context.edits
    assert not graph.log.of(Noted)


def test_an_edit_that_breaks_its_contract_costs_one_rewrite() -> None:
    graph, node = program()
    session = RewriteSession(graph, RewriteContext("test"))

    def edit(rw: Rewriter) -> None:
        del rw
        raise RewriteError("it cannot be done")

    done = session.rewrite_always("broken", node, edit, proof=Exactness.EXACT)

    assert isinstance(done, Undone)
    assert done.wrong == "it cannot be done"
