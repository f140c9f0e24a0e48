"""Runs rules to a fixpoint, and asks price, permission and proof around every rewrite."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch._ops import OpOverload
from torch.fx import Node

from qfuse.cost.model import CostModel
from qfuse.ir.errors import RULE_ERRORS, QfuseError, RewriteError
from qfuse.ir.events import EventLog, Exactness, Fired, MissCode, Missed, Noted, RolledBack
from qfuse.ir.graph.schema import overload_of
from qfuse.ir.graph.stage_graph import StageGraph, place_of
from qfuse.rewrite.budget import RewriteBudget
from qfuse.rewrite.pattern import pointed
from qfuse.rewrite.rewriter import GraphEditor, Journal, Rewriter, origins
from qfuse.rewrite.rule import Miss, Rule

# Each rewrite consumes at least one node or fills one slot of a fused op, so a run that rewrites
# far more often than it has nodes goes in circles.
_REWRITES_PER_NODE = 8

# What matched came further than anything that did not.
_MATCHED = 1_000


class Checker(Protocol):
    """Proves one rewrite by values, before it is committed."""

    def check(self, journal: Journal, exactness: Exactness, what: str) -> str | None:
        """Return what is wrong with the rewrite, or ``None``."""

    def forget(self, nodes: Sequence[Node]) -> None:
        """Drop what is remembered of erased nodes."""


@dataclass(slots=True)
class RewriteContext:
    """What a run of rules is given besides the graph.

    Attributes:
        room: Name of the room, for events.
        cost: Prices sites; ``None`` fires whatever is legal.
        gate: Permits rewrites.
        checker: Proves rewrites; ``None`` trusts them.
        strict: Whether a rule whose match raises ends the run, as in tests. Otherwise it costs one
            rewrite, and a warning: somebody's model is worth more than our bug.
        scope: Names of the captured nodes that may be rewritten; ``None`` is all of them.
        assume_equal: Whether parameters without values are taken as equal where they look alike.
    """

    stage: str
    cost: CostModel | None = None
    budget: RewriteBudget = field(default_factory=RewriteBudget)
    checker: Checker | None = None
    strict: bool = True
    scope: frozenset[str] | None = None
    assume_equal: bool = False

    def covers(self, node: Node) -> bool:
        """Whether ``node`` stands for a captured node that may be rewritten."""
        return self.scope is None or not self.scope.isdisjoint(origins(node))


@dataclass(slots=True)
class PassResult:
    """What a run did: how often each rule fired, and why it did not elsewhere."""

    fired: Counter[str] = field(default_factory=Counter)
    misses: list[tuple[str, Miss]] = field(default_factory=list)

    @property
    def modified(self) -> bool:
        """Whether any rule fired."""
        return bool(self.fired)


def apply_rules(
    program: StageGraph, rules: Sequence[Rule[Any]], context: RewriteContext | None = None
) -> PassResult:
    """Apply ``rules`` to a fixpoint; the first in the list that matches a node wins.

    A node is looked at again only when something next to it changed, so the cost grows linearly
    with the graph.

    Raises:
        RewriteError: The rules do not come to rest; the message names those that alternate.
    """
    return _Run(program, rules, context or RewriteContext("rewrite")).run()


class _Run:
    """State of one call of :func:`apply_rules`."""

    def __init__(
        self, program: StageGraph, rules: Sequence[Rule[Any]], context: RewriteContext
    ) -> None:
        self._log: EventLog = program.log
        self._context = context
        self._editor = GraphEditor(program.module)
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
            if self._fire(rule, node, site, gain):
                return

    def _decide(self, rule: Rule[Any], node: Node) -> tuple[Any, float | None] | Miss:
        """Match, then ask the price. Legality first: an illegal site has no price."""
        failed = self._failed.get((rule.name, node))
        if failed is not None:
            return failed
        try:
            site = rule.match(node)
        except (*RULE_ERRORS, QfuseError) as error:
            # While normalizing, an error of ours is about the model: an op of it is malformed.
            ours = isinstance(error, QfuseError) and self._context.stage == "normalize"
            if self._context.strict or ours:
                raise
            text = f"the rule {rule.name} failed here, which is a bug: please report it ({error!r})"
            self._log.add(Noted(self._context.stage, text, place_of(node), warn=True))
            return Miss(MissCode.PATTERN, node, "the rule failed", progress=0)
        if isinstance(site, Miss):
            return site
        cost = self._context.cost
        gain = None if cost is None else rule.gain(site, cost)
        if gain is not None and not gain > 0:
            text = "it would cost {:.3g} us per call" if math.isfinite(gain) else "it never pays"
            return Miss(MissCode.PROFIT, node, text, -gain * 1e6, progress=_MATCHED)
        return site, gain

    def _fire(self, rule: Rule[Any], node: Node, site: Any, gain: float | None) -> bool:
        key = f"{self._context.stage}/{rule.name}@{node.name}"
        if not self._context.budget.allows(key):
            if self._context.budget.bans(key):
                reason = "it is switched off, or changed values here and was rolled back"
                self._misses[rule.name, node] = Miss(MissCode.BANNED, node, reason)
            return False
        place = place_of(node)
        rw = self._editor.rewriter(rule.name, node)
        wrong = self._attempt(rule, site, key, rw)
        if wrong is not None:
            rw.undo()
            self._roll_back(rule, node, key, wrong)
            return False
        made_names = tuple(n.name for n in rw.journal.made)
        erased, around = rw.commit()
        self._verify_and_commit(erased, around)
        places = (place,)
        self._log.add(
            Fired(
                self._context.stage,
                rule.name,
                key,
                rule.exactness,
                places,
                made_names,
                predicted_gain=gain,
            )
        )
        self._count(rule.name)
        return True

    def _attempt(self, rule: Rule[Any], site: Any, key: str, rw: Rewriter) -> str | None:
        """Rewrite and prove; return why the rewrite cannot stay, ``None`` if it can.

        A rule that breaks its contract loses one rewrite, not the user's whole compilation.
        """
        try:
            rule.rewrite(site, rw)
        except RewriteError as error:
            return error.what
        checker = self._context.checker
        if checker is None:
            return None
        return checker.check(rw.journal, rule.proof or rule.exactness, key)

    def _roll_back(self, rule: Rule[Any], node: Node, key: str, wrong: str) -> None:
        """Say why a rewrite was undone, and never try it again: nothing else would come of it."""
        miss = Miss(MissCode.BANNED, node, "it was rolled back here: {}", wrong)
        self._failed[rule.name, node] = self._misses[rule.name, node] = miss
        places = (place_of(node),)
        self._log.add(RolledBack(self._context.stage, rule.name, key, places, wrong))

    def _verify_and_commit(self, erased: list[Node], around: list[Node]) -> None:
        self._erased.update(erased)
        if self._context.checker is not None:
            self._context.checker.forget(erased)
        for near in around:
            if near not in self._waiting and near not in self._erased:
                self._waiting.add(near)
                self._queue.append(near)

    def _count(self, name: str) -> None:
        self._result.fired[name] += 1
        self._recent.append(name)
        if self._result.fired.total() > self._budget:
            loop = ", ".join(sorted(set(self._recent)))
            raise RewriteError(
                f"the rules do not come to rest; these alternate: {loop}",
                fix="this is a bug in one of the rules; please report it with the model",
            )

    def _report_misses(self) -> None:
        for (name, node), miss in self._misses.items():
            if node in self._erased or miss.at in self._erased or miss.progress == 0:
                continue
            self._result.misses.append((name, miss))
            self._log.add(
                Missed(
                    self._context.stage,
                    name,
                    miss.code,
                    miss.reason,
                    place_of(node),
                    place_of(miss.at),
                    miss.progress,
                    pointed(miss),
                )
            )
