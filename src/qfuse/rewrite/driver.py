"""Applies rules to a fixpoint; every rewrite is priced, permitted and proved."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch._ops import OpOverload
from torch.fx import Node

from qfuse.ir.errors import RULE_ERRORS, ExtensionError, QfuseError, RewriteError
from qfuse.ir.events import Fired, MissCode, Noted, Place
from qfuse.ir.foreign import call_foreign
from qfuse.ir.graph.schema import overload_of
from qfuse.ir.graph.stage_graph import StageGraph, place_of
from qfuse.ir.out_of_memory import shortage_of
from qfuse.rewrite.context import PassResult, RewriteContext
from qfuse.rewrite.rewriter import Rewriter
from qfuse.rewrite.rule import Miss, Rule
from qfuse.rewrite.session import Applied, RewriteSession, Undone

# Each rewrite consumes at least one node or fills one slot of a fused op, so a run that rewrites
# far more often than it has nodes is in a cycle.
_REWRITES_PER_NODE = 8

# The progress of a full match, which is greater than that of any partial one.
_MATCHED = 1_000


def apply_rules(
    program: StageGraph, rules: Sequence[Rule[Any]], context: RewriteContext | None = None
) -> PassResult:
    """Apply ``rules`` to a fixpoint; the first in the list that matches a node wins.

    A node is visited again only when a neighbour changed, so the cost is linear in the size of
    the graph.

    Raises:
        ExtensionError: A rule fails, and the context is strict.
        RewriteError: The rules do not converge; the message names those that alternate.
    """
    return _Run(program, rules, context or RewriteContext("rewrite")).run()


class _Run:
    """State of one call of :func:`apply_rules`."""

    def __init__(
        self, program: StageGraph, rules: Sequence[Rule[Any]], context: RewriteContext
    ) -> None:
        self._program = program
        self._context = context
        self._session = RewriteSession(program, context)
        self._by_anchor: dict[OpOverload, list[Rule[Any]]] = {}
        for rule in rules:
            for anchor in rule.anchors:
                self._by_anchor.setdefault(anchor, []).append(rule)
        self._queue: deque[Node] = deque(program.graph.nodes)
        self._waiting = set(self._queue)
        self._erased: set[Node] = set()
        self._misses: dict[tuple[str, Node], Miss] = {}
        self._failed: dict[tuple[str, Node], Miss] = {}
        self._result = PassResult()
        # A cycle of rules is short, so the last names show all of it.
        self._recent: deque[str] = deque(maxlen=32)
        self._budget = _REWRITES_PER_NODE * (len(self._queue) + 8)

    def run(self) -> PassResult:
        while self._queue:
            node = self._queue.popleft()
            self._waiting.discard(node)
            if node not in self._erased:
                self._visit(node)
        self._report_misses()
        return self._result

    def _visit(self, node: Node) -> None:
        op = overload_of(node)
        if op is None or op not in self._by_anchor or not self._context.covers(node):
            return
        for rule in self._by_anchor[op]:
            found = self._decide(rule, node)
            if isinstance(found, Miss):
                self._misses[rule.name, node] = found
                continue
            self._misses.pop((rule.name, node), None)
            site, gain = found
            # The node may be erased now; if not, it is queued again when a neighbour changed.
            if self._fire(rule, node, site, gain):
                return

    def _decide(self, rule: Rule[Any], node: Node) -> tuple[Any, float | None] | Miss:
        """Match, then price. Legality comes first: an illegal site does not have a price."""
        failed = self._failed.get((rule.name, node))
        if failed is not None:
            return failed
        try:
            site = rule.match(node)
            if site is None:
                raise TypeError("match returned None, and not a site or a Miss with the reason")
        except (*RULE_ERRORS, QfuseError) as error:
            if shortage_of(error) is not None:
                raise
            if isinstance(error, QfuseError) and (
                self._context.strict or self._context.raise_model_errors
            ):
                raise
            text = f"the rule {rule.name} failed here, which is a bug"
            if self._context.strict:
                where = str(place_of(node))
                raise ExtensionError(f"{text}: {error!r}", where=where, fix=_fix(rule)) from error
            text = f"{text}: {_fix(rule)} ({error!r})"
            self._program.log.add(Noted(self._context.stage, text, place_of(node), warn=True))
            return Miss(MissCode.PATTERN, node, "the rule failed", progress=0)
        if isinstance(site, Miss):
            return site
        cost = self._context.cost
        gain = None if cost is None else rule.gain(site, cost)
        # Written so that a gain of NaN is refused as well.
        if gain is not None and not gain > 0:
            text = "it would cost {:.3g} us per call" if math.isfinite(gain) else "it never pays"
            return Miss(MissCode.PROFIT, node, text, -gain * 1e6, progress=_MATCHED)
        return site, gain

    def _fire(self, rule: Rule[Any], node: Node, site: Any, gain: float | None) -> bool:
        places = (place_of(node),)

        def fired(key: str, rw: Rewriter, _: object) -> Fired:
            made = tuple(n.name for n in rw.journal.made)
            stage = self._context.stage
            return Fired(stage, rule.name, key, rule.exactness, places, made, predicted_gain=gain)

        done = self._session.rewrite(
            rule.name,
            node,
            partial(self._edit, rule, site, places[0]),
            proof=rule.proof or rule.exactness,
            event=fired,
        )
        if isinstance(done, Applied):
            self._requeue(done.erased, done.around)
            self._count(rule.name)
            return True
        if isinstance(done, Undone):
            # Banned, so that it is not tried again: rewriting is deterministic.
            miss = Miss(MissCode.BANNED, node, "it was rolled back here: {}", done.wrong)
            self._failed[rule.name, node] = self._misses[rule.name, node] = miss
        # Out of fuel is no reason for the report: it happens only while bisecting.
        elif done.banned:
            reason = self._context.budget.why_banned(self._context.key(rule.name, node))
            self._misses[rule.name, node] = Miss(MissCode.BANNED, node, reason)
        return False

    def _edit(self, rule: Rule[Any], site: Any, place: Place, rw: Rewriter) -> None:
        """Rewrite; as for ``match``, only this rewrite is lost if it fails, except in tests."""
        call_foreign(
            rule.rewrite,
            site,
            rw,
            what=f"the rewrite of the rule {rule.name}",
            where=str(place),
            fix=_fix(rule),
            # It undoes the rewrite.
            kind=ExtensionError if self._context.strict else RewriteError,
        )

    def _requeue(self, erased: Sequence[Node], around: Sequence[Node]) -> None:
        self._erased.update(erased)
        for near in around:
            if near not in self._waiting and near not in self._erased:
                self._waiting.add(near)
                self._queue.append(near)

    def _count(self, name: str) -> None:
        self._result.fired[name] += 1
        self._recent.append(name)
        if self._result.fired.total() > self._budget:
            raise _diverged(self._recent, self._by_anchor)

    def _report_misses(self) -> None:
        for (name, node), miss in self._misses.items():
            # A miss at a node that is gone explains nothing in the graph that remains.
            if node in self._erased or miss.at in self._erased or miss.progress == 0:
                continue
            self._result.miss(self._program, self._context, name, node, miss)


def _fix(rule: Rule[Any]) -> str:
    module = _foreign_module(rule)
    return "please report it" if module is None else f"fix {module}"


def _foreign_module(rule: Rule[Any]) -> str | None:
    """Return the module of a rule of another package."""
    module = type(rule).__module__
    return None if module.partition(".")[0] == "qfuse" else module


def _diverged(
    recent: Iterable[str], by_anchor: Mapping[OpOverload, Sequence[Rule[Any]]]
) -> RewriteError:
    """Name the rules that alternate, those of other packages with their module."""
    rules = {rule.name: rule for some in by_anchor.values() for rule in some}
    names = sorted(set(recent))
    foreign = {name: module for name in names if (module := _foreign_module(rules[name]))}
    loop = ", ".join(f"{name} (of {foreign[name]})" if name in foreign else name for name in names)
    # qfuse's own rules converge without those of others.
    fix = "this is a bug in one of the rules; please report it with the model"
    if foreign:
        fix = f"fix {', '.join(dict.fromkeys(foreign.values()))}, or uninstall its package"
    return RewriteError(f"the rules do not converge; these alternate: {loop}", fix=fix)
