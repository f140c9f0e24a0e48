"""What a run of rules or passes is given besides the graph, and what it gives back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch.fx import Node

from qfuse.cost.model import CostModel
from qfuse.ir.events import Exactness, Missed, Place
from qfuse.ir.graph.stage_graph import StageGraph, place_of
from qfuse.rewrite.budget import RewriteBudget
from qfuse.rewrite.pattern import pointed
from qfuse.rewrite.rewriter import Journal, origins
from qfuse.rewrite.rule import Miss


class Checker(Protocol):
    """Proves one rewrite by values, before it is committed."""

    def check(self, journal: Journal, exactness: Exactness, what: str) -> str | None:
        """Return what is wrong with the rewrite, or ``None``."""

    def forget(self, nodes: Sequence[Node]) -> None:
        """Drop what is remembered of erased nodes."""


@dataclass(frozen=True, slots=True)
class Edit:
    """A rewrite that was committed, as the journal of its rewriter has it.

    Attributes:
        rule: Name of the rule or pass.
        anchor: Where it happened.
        replaced: Names of the nodes that were replaced, and of those that stand for them.
    """

    rule: str
    anchor: Place
    replaced: tuple[tuple[str, str], ...]


@dataclass(slots=True)
class RewriteContext:
    """What a run of rules is given besides the graph.

    Attributes:
        stage: Name of the stage, for events.
        cost: Prices sites; ``None`` fires whatever is legal.
        budget: Permits rewrites.
        checker: Proves rewrites; ``None`` trusts them.
        strict: Whether a rule whose match raises ends the run, as in tests. Otherwise it costs one
            rewrite, and a warning: a user's model is worth more than our bug.
        scope: Names of the captured nodes that may be rewritten; ``None`` is all of them.
        assume_equal: Whether parameters without values are taken as equal where they look alike.
        raise_model_errors: Whether an error of qfuse that a match raises is about the model, as
            while normalizing, where an op of it may be malformed. It is raised then.
        log_misses: Whether misses are logged; otherwise they are only in the result, as those of
            a round that is followed by another are.
        edits: What was committed, in order.
    """

    stage: str
    cost: CostModel | None = None
    budget: RewriteBudget = field(default_factory=RewriteBudget)
    checker: Checker | None = None
    strict: bool = True
    scope: frozenset[str] | None = None
    assume_equal: bool = False
    raise_model_errors: bool = False
    log_misses: bool = True
    edits: list[Edit] = field(default_factory=list)

    def covers(self, node: Node) -> bool:
        """Whether ``node`` stands for a captured node that may be rewritten."""
        return self.scope is None or not self.scope.isdisjoint(origins(node))

    def key(self, rule: str, node: Node) -> str:
        """Return the identity of a rewrite within one compilation: ``stage/rule@node``."""
        return f"{self.stage}/{rule}@{node.name}"


@dataclass(slots=True)
class PassResult:
    """What a run did: how often each rule fired, and why it did not elsewhere.

    Attributes:
        fired: How often each rule fired.
        misses: Why a rule did not fire, by the name of the rule.
        missed: The same as events; whether they are in the log is up to the context.
    """

    fired: Counter[str] = field(default_factory=Counter)
    misses: list[tuple[str, Miss]] = field(default_factory=list)
    missed: list[Missed] = field(default_factory=list)

    @property
    def modified(self) -> bool:
        """Whether any rule fired."""
        return bool(self.fired)

    def miss(
        self, program: StageGraph, context: RewriteContext, rule: str, node: Node, miss: Miss
    ) -> None:
        """Note why ``rule`` did not fire at ``node``."""
        places = place_of(node), place_of(miss.at)
        pattern = pointed(miss)
        event = Missed(context.stage, rule, miss.code, miss.reason, *places, miss.progress, pattern)
        self.misses.append((rule, miss))
        self.missed.append(event)
        if context.log_misses:
            program.log.add(event)
