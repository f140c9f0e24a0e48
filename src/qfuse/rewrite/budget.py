"""Rewrite budget: fuel for bisection, and a list of banned rewrites."""

from __future__ import annotations

from dataclasses import dataclass, field

from qfuse.ir.events import Place


@dataclass(slots=True)
class RewriteBudget:
    """Decides before every rewrite, in order, whether it may happen.

    Rewriting is deterministic, so the first ``fuel`` rewrites of two runs over the same graph
    are the same rewrites: a faulty one is found by bisecting on ``fuel`` and banned by its key.

    Attributes:
        fuel: Number of rewrites that may happen; ``None`` means no limit.
        banned: Keys of rewrites that may not happen, and names of rules that are disabled
            (``lower/lower-linear``).
        by_options: Those of ``banned`` that the user's options name.
        by_plan: Those of ``banned`` that a plan has as off.
        allowed: Keys of the rewrites that happened, in order.
        places: Where each key was first asked for, whether it was permitted or not.
    """

    fuel: int | None = None
    banned: frozenset[str] = frozenset()
    by_options: frozenset[str] = frozenset()
    by_plan: frozenset[str] = frozenset()
    allowed: list[str] = field(default_factory=list)
    places: dict[str, Place] = field(default_factory=dict)

    def bans(self, key: str) -> bool:
        """Whether the rewrite ``key``, or its whole rule, is banned."""
        return key in self.banned or rule_of(key) in self.banned

    def why_banned(self, key: str) -> str:
        """Return the reason for a user why a rewrite that is banned did not happen."""
        names = {key, rule_of(key)}
        if names & self.by_options:
            return "it is switched off by an option"
        if names & self.by_plan:
            return "it is off in the plan"
        return "it changed values here and was rolled back"

    def allows(self, key: str, place: Place | None = None) -> bool:
        """Whether the rewrite ``key`` may happen at ``place``; if so, it uses fuel."""
        if place is not None:
            self.places.setdefault(key, place)
        # What is denied uses no fuel: fuel counts rewrites that happened, so bisecting on it finds
        # one.
        if self.bans(key) or (self.fuel is not None and len(self.allowed) >= self.fuel):
            return False
        self.allowed.append(key)
        return True


def rule_of(key: str) -> str:
    """Return the stage and rule of a key: ``lower/lower-linear`` of ``lower/lower-linear@n``."""
    return key.partition("@")[0]
