"""The context of a run of rules or passes, and its result."""

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
        """Drop cached values of erased nodes."""


@dataclass(frozen=True, slots=True)
class Edit:
    """A committed rewrite, as recorded in its rewriter's journal.

    Attributes:
        rule: Name of the rule or pass.
        anchor: Where it happened.
        replaced: Pairs of names: a replaced node, and its replacement.
    """

    rule: str
    anchor: Place
    replaced: tuple[tuple[str, str], ...]


@dataclass(slots=True)
class RewriteContext:
    """Everything besides the graph that a run of rules needs.

    Attributes:
        stage: Name of the stage, for events.
        cost: Prices sites; ``None`` applies every legal rewrite.
        budget: Permits rewrites.
        checker: Checks rewrites by values; ``None`` skips the check.
        strict: Whether a rule that fails is an ExtensionError, as in tests. Otherwise only that
            rewrite is lost, with a warning, so that a bug in qfuse does not break a user's model.
        scope: Names of the captured nodes that may be rewritten; ``None`` means all of them.
        assume_equal: Whether parameters without values are assumed equal if their metadata match.
        raise_model_errors: Whether a QfuseError from a match is about the model and propagates.
            True while normalizing, where an op of the model may be malformed.
        missed: A list that takes the misses, which a later phase may resolve; ``None`` logs them.
        edits: The committed rewrites, in order.
    """

    stage: str
    cost: CostModel | None = None
    budget: RewriteBudget = field(default_factory=RewriteBudget)
    checker: Checker | None = None
    strict: bool = True
    scope: frozenset[str] | None = None
    assume_equal: bool = False
    raise_model_errors: bool = False
    missed: list[Missed] | None = None
    edits: list[Edit] = field(default_factory=list)

    def covers(self, node: Node) -> bool:
        """Whether ``node`` stands for a captured node that may be rewritten."""
        return self.scope is None or not self.scope.isdisjoint(origins(node))

    def miss(self, program: StageGraph, event: Missed) -> None:
        """Log ``event``, or add it to the misses that are kept for later."""
        if self.missed is None:
            program.log.add(event)
        else:
            self.missed.append(event)

    def key(self, rule: str, node: Node) -> str:
        """Return the identity of a rewrite within one compilation: ``stage/rule@node``."""
        return f"{self.stage}/{rule}@{node.name}"


@dataclass(slots=True)
class PassResult:
    """The result of a run: how often each rule fired, and the misses elsewhere.

    Attributes:
        fired: How often each rule fired.
        misses: The misses, with the name of the rule.
        missed: The same as events, which the context has logged or kept.
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
        """Record why ``rule`` did not fire at ``node``."""
        places = place_of(node), place_of(miss.at)
        event = Missed(
            *(context.stage, rule, miss.code, miss.reason, *places, miss.progress, pointed(miss)),
            held=miss.held,
            conditions=miss.conditions,
        )
        self.misses.append((rule, miss))
        self.missed.append(event)
        context.miss(program, event)
