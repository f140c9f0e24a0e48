from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tests.support.toy_rules import (
    BlindRule,
    BrokenNeg,
    CostlyRelu,
    DoubleNegation,
    MulToNeg,
    NegToMul,
    WrongAbs,
)

from qfuse.cost import CostModel, CostProfile
from qfuse.ir.errors import ExtensionError, OutOfMemoryError, RewriteError
from qfuse.ir.events import Fired, MissCode, Missed, Noted, RolledBack
from qfuse.ir.graph.text import to_text
from qfuse.ir.out_of_memory import out_of_memory_errors
from qfuse.rewrite.budget import RewriteBudget
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.prelude import Node, Rewriter
from qfuse.rewrite.rewriter import GraphEditor, origins
from qfuse.rewrite.site_check import SiteChecker
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten


def chain(count: int) -> GraphBuilder:
    """A builder with an input ``x`` and ``count`` negations of it."""
    b = GraphBuilder()
    node = b.arg("x", torch.float32, "m", 4)
    for _ in range(count):
        node = b.call(aten.neg.default, node)
    return b


def last(b: GraphBuilder) -> torch.fx.Node:
    """The newest node."""
    node: torch.fx.Node = next(iter(reversed(b.graph.nodes)))
    return node


@pytest.mark.parametrize(("count", "left"), [(2, 0), (3, 1), (8, 0), (101, 1)])
def test_runs_to_a_fixpoint(count: int, left: int) -> None:
    b = chain(count)
    program = b.done(b.call(aten.abs.default, last(b)))

    result = apply_rules(program, [DoubleNegation()])

    assert result.fired == {"double-negation": count // 2}
    assert sum(n.target is aten.neg.default for n in program.graph.nodes) == left


def test_names_the_rules_that_alternate() -> None:
    b = chain(3)
    program = b.done(last(b))

    toys = "tests.support.toy_rules"
    both = rf"mul-to-neg \(of {toys}\), neg-to-mul \(of {toys}\)"
    with pytest.raises(RewriteError, match=both) as caught:
        apply_rules(program, [NegToMul(), MulToNeg()])
    assert f"fix {toys}, or uninstall its package" in str(caught.value)


def test_the_first_rule_wins() -> None:
    b = chain(1)
    program = b.done(last(b))

    assert apply_rules(program, [NegToMul(), WrongAbs()]).fired == {"neg-to-mul": 1}


def test_reports_the_last_word_on_every_node_that_survives() -> None:
    b = chain(3)
    program = b.done(b.call(aten.abs.default, last(b)))

    result = apply_rules(program, [DoubleNegation()])

    assert [m.code for _, m in result.misses] == [MissCode.PATTERN]
    (event,) = program.log.of(Missed)
    assert event.reason == "x is not a negation"


def test_what_does_not_pay_is_a_miss_with_its_price() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 4)
    program = b.done(b.call(aten.relu.default, x))
    context = RewriteContext("test", CostModel(CostProfile.pinned()))

    result = apply_rules(program, [CostlyRelu()], context)

    ((_, miss),) = result.misses
    assert (miss.code, miss.reason) == (MissCode.PROFIT, "it would cost 2 us per call")
    assert apply_rules(clone(program), [CostlyRelu()]).fired == {"costly-relu": 1}


def test_fuel_takes_the_first_rewrites_and_no_more() -> None:
    b = chain(9)
    program = b.done(b.call(aten.abs.default, last(b)))
    everything, some = clone(program), clone(program)
    full, limited = RewriteBudget(), RewriteBudget(fuel=2)

    apply_rules(everything, [DoubleNegation()], RewriteContext("test", budget=full))
    apply_rules(some, [DoubleNegation()], RewriteContext("test", budget=limited))

    assert len(full.allowed) == 4
    assert limited.allowed == full.allowed[:2]


def test_a_banned_rewrite_stays_away_and_is_reported() -> None:
    b = chain(2)
    program = b.done(b.call(aten.abs.default, last(b)))
    budget = RewriteBudget()
    apply_rules(clone(program), [DoubleNegation()], RewriteContext("test", budget=budget))

    banned = RewriteBudget(banned=frozenset(budget.allowed))
    result = apply_rules(program, [DoubleNegation()], RewriteContext("test", budget=banned))

    assert not result.modified
    assert MissCode.BANNED in [m.code for _, m in result.misses]


def test_a_rewrite_that_changes_values_is_undone() -> None:
    b = chain(2)
    program = b.done(b.call(aten.abs.default, last(b)))
    before = to_text(program.graph)
    inputs = random_inputs(program, m=5)
    context = RewriteContext("test", checker=SiteChecker(program, inputs))

    result = apply_rules(program, [WrongAbs()], context)

    assert not result.modified
    assert to_text(program.graph) == before
    assert len(program.log.of(RolledBack)) == 2
    assert not program.log.of(Fired)
    program.graph.lint()


@pytest.mark.parametrize("how", ["call", "type"])
def test_a_rule_that_breaks_its_contract_loses_that_rewrite_only(how: str) -> None:
    b = chain(1)
    y = b.call(aten.neg.default, b.call(aten.neg.default, b.call(aten.relu.default, last(b))))
    program = b.done(b.call(aten.abs.default, y))
    inputs = random_inputs(program, m=5)
    want = run(clone(program), inputs)
    broken = BrokenNeg(how)

    result = apply_rules(program, [broken, DoubleNegation()])

    # The pair of negations still goes away, and nobody tries the broken rule twice at one node,
    # although the surroundings of what is left have changed.
    assert result.fired == {"double-negation": 1}
    assert broken.calls == 3
    events = program.log.of(RolledBack)
    assert {e.rule for e in events} == {"broken-neg"}
    assert len({e.key for e in events}) == len(events) == 3
    assert all(e.reason and e.places for e in events)
    left = [m for name, m in result.misses if name == "broken-neg"]
    assert [m.code for m in left] == [MissCode.BANNED]
    program.graph.lint()
    assert torch.equal(run(program, inputs)[0], want[0])


def test_a_rewrite_that_failed_its_check_is_not_tried_again() -> None:
    b = chain(1)
    # Changes behind the first negation put it back on the worklist.
    y = b.call(aten.relu.default, last(b))
    program = b.done(b.call(aten.neg.default, b.call(aten.neg.default, y)))
    context = RewriteContext("test", checker=SiteChecker(program, random_inputs(program, m=5)))

    result = apply_rules(program, [DoubleNegation(), WrongAbs()], context)

    keys = [e.key for e in program.log.of(RolledBack)]
    assert len(keys) == len(set(keys)) > 0
    assert MissCode.BANNED in [m.code for name, m in result.misses if name == "wrong-abs"]


def test_a_right_rewrite_passes_its_site_check() -> None:
    b = chain(4)
    program = b.done(b.call(aten.abs.default, last(b)))
    inputs = random_inputs(program, m=5)
    want = run(clone(program), inputs)

    context = RewriteContext("test", checker=SiteChecker(program, inputs))
    assert apply_rules(program, [DoubleNegation()], context).fired.total() == 2
    assert torch.equal(run(program, inputs)[0], want[0])


def test_a_new_node_stands_for_what_it_replaced() -> None:
    b = chain(1)
    (neg,) = [n for n in b.graph.nodes if n.op == "call_function"]
    program = b.done(b.call(aten.abs.default, neg))

    apply_rules(program, [NegToMul()])

    (mul,) = [n for n in program.graph.nodes if n.target is aten.mul.Tensor]
    assert origins(mul) == (neg.name,)


def test_a_replacement_of_another_type_is_refused_and_undone() -> None:
    b = chain(1)
    node = last(b)
    program = b.done(b.call(aten.abs.default, node))
    before = to_text(program.graph)
    rw = GraphEditor(program.module).rewriter("bad", node)
    wide = rw.call(aten._to_copy.default, node.args[0], dtype=torch.float64)

    with pytest.raises(RewriteError, match=r"float32\[s\d+, 4\] to float64"):
        rw.replace(node, wide)
    assert to_text(program.graph) == before


def test_a_call_that_its_op_rejects_is_refused_and_undone() -> None:
    b = chain(1)
    node = last(b)
    program = b.done(node)
    before = to_text(program.graph)
    rw = GraphEditor(program.module).rewriter("bad", node)

    with pytest.raises(RewriteError, match="rule bad"):
        rw.call(aten.permute.default, node, [0, 1, 2])
    assert to_text(program.graph) == before


def test_one_tensor_is_one_constant() -> None:
    b = chain(1)
    node = last(b)
    program = b.done(node)
    rw = GraphEditor(program.module).rewriter("constants", node)
    value = torch.ones(3)

    first, second, third = (rw.constant(v, "c") for v in (value, value, value.clone()))

    assert first.target == second.target != third.target


def test_a_rule_that_fails_to_look_costs_a_warning_not_the_model() -> None:
    b = chain(1)
    program = b.done(last(b))
    with pytest.raises(ExtensionError, match=r"the rule blind failed here.*did not foresee"):
        apply_rules(program, [BlindRule()])
    assert not apply_rules(program, [BlindRule()], RewriteContext("test", strict=False)).fired
    (note,) = program.log.of(Noted)
    assert note.warn
    assert "the rule blind failed here" in note.text
    assert "fix tests.support.toy_rules" in note.text, "it is not a rule of qfuse"


class Forgets(NegToMul):
    """Has a match without a return."""

    name = "forgets"

    def match(self, node: Node) -> Any:
        del node


class Breaks(NegToMul):
    """Fails after half of its edit."""

    name = "breaks"

    def rewrite(self, site: Node, rw: Rewriter) -> None:
        rw.call(aten.abs.default, site.args[0])
        raise KeyError("half")


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        (Forgets(), "the rule forgets failed here.*match returned None"),
        (Breaks(), "the rewrite of the rule breaks failed: KeyError.'half'"),
    ],
)
def test_a_rule_that_breaks_its_contract_is_named(rule: NegToMul, complaint: str) -> None:
    b = GraphBuilder()
    program = b.done(b.call(aten.neg.default, b.arg("x", torch.float32, 3)))
    before = to_text(program.graph)
    assert not apply_rules(program, [rule], RewriteContext("test", strict=False)).fired
    assert to_text(program.graph) == before
    said = [e.text for e in program.log.of(Noted)] + [e.reason for e in program.log.of(RolledBack)]
    assert any(re.search(complaint, text) for text in said)
    with pytest.raises(ExtensionError, match=complaint):
        apply_rules(program, [rule])


class Starves(NegToMul):
    """Finds no memory, in one of its two steps."""

    name = "starves"

    def __init__(self, step: str) -> None:
        self.step = step

    def match(self, node: Node) -> Any:
        if self.step == "match":
            torch.empty(1 << 60, dtype=torch.uint8)
        return super().match(node)

    def rewrite(self, site: Node, rw: Rewriter) -> None:
        rw.replace(site, rw.call(aten.abs.default, site.args[0]))
        torch.empty(1 << 60, dtype=torch.uint8)


@pytest.mark.parametrize("step", ["match", "rewrite"])
def test_a_lack_of_memory_is_no_bug_of_the_rule(step: str) -> None:
    b = GraphBuilder()
    program = b.done(b.call(aten.neg.default, b.arg("x", torch.float32, 3)))

    with pytest.raises(OutOfMemoryError), out_of_memory_errors("rewriting"):
        apply_rules(program, [Starves(step)], RewriteContext("test", strict=False))

    assert not program.log.of(Noted)
    assert not program.log.of(RolledBack)
